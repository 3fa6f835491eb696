"""The nouns and protocols of outrider: data and interfaces, no computation.

Dimensions, used as name suffixes everywhere:

    B rows of the batch      N nodes of a draft tree, node 0 is the pending token
    D depth of the tree      K most draws at one node
    R law rows of a draft    V vocabulary       Q queries in one model call
    L token buffer length    W visible width of a cache

A leading dimension of a *topology* tensor (tree, draw tables) is either B or 1: 1 means that all
rows share it and it broadcasts.
"""

from outrider.types.drafters import (
    PLAIN,
    Context,
    Drafter,
    Foreseeing,
    Known,
    Shape,
)
from outrider.types.drafts import (
    CONTEXT,
    FAULT,
    LENGTH,
    REASONS,
    RUNNING,
    STOP,
    Block,
    BlockLists,
    Draft,
    Draws,
    Ends,
    Host,
    Kind,
    Laws,
    Outcome,
    Scores,
    Tree,
    Verdict,
    Verifier,
)
from outrider.types.models import (
    Cache,
    Encoded,
    Inputs,
    LanguageModel,
    Nodes,
    Output,
    Reads,
    RowStore,
    Tokenizer,
)

__all__ = [
    "CONTEXT",
    "FAULT",
    "LENGTH",
    "PLAIN",
    "REASONS",
    "RUNNING",
    "STOP",
    "Block",
    "BlockLists",
    "Cache",
    "Context",
    "Draft",
    "Drafter",
    "Draws",
    "Encoded",
    "Ends",
    "Foreseeing",
    "Host",
    "Inputs",
    "Kind",
    "Known",
    "LanguageModel",
    "Laws",
    "Nodes",
    "Outcome",
    "Output",
    "Reads",
    "RowStore",
    "Scores",
    "Shape",
    "Tokenizer",
    "Tree",
    "Verdict",
    "Verifier",
]
