"""The nouns and protocols of outrider: data and interfaces, no computation.

Dimensions, used as name suffixes everywhere:

    B rows of the batch      N nodes of a draft tree, node 0 is the pending token
    D depth of the tree      K most draws at one node
    R law rows of a draft    V vocabulary       Q queries in one model call
    L token buffer length    W visible width of a cache

A leading dimension of a *topology* tensor (tree, draw tables) is either B or 1: 1 means that all
rows share it and it broadcasts.
"""

from outrider.types.drafts import (
    CONTEXT,
    FAULT,
    LENGTH,
    PLAIN,
    REASONS,
    RUNNING,
    STOP,
    UNCOUPLED,
    Context,
    Draft,
    Drafter,
    DraftShape,
    DrawKind,
    Draws,
    Ends,
    Foreseeing,
    Host,
    Laws,
    Mixed,
    Outcome,
    RowHints,
    Scores,
    StepLists,
    StepTensors,
    Tree,
    Verdict,
    Verifier,
)
from outrider.types.models import (
    Cache,
    Encoded,
    Inputs,
    LanguageModel,
    MultiModalInputs,
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
    "UNCOUPLED",
    "Cache",
    "Context",
    "Draft",
    "DraftShape",
    "Drafter",
    "DrawKind",
    "Draws",
    "Encoded",
    "Ends",
    "Foreseeing",
    "Host",
    "Inputs",
    "LanguageModel",
    "Laws",
    "Mixed",
    "MultiModalInputs",
    "Nodes",
    "Outcome",
    "Output",
    "Reads",
    "RowHints",
    "RowStore",
    "Scores",
    "StepLists",
    "StepTensors",
    "Tokenizer",
    "Tree",
    "Verdict",
    "Verifier",
]
