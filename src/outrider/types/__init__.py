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
    CONTEXT as CONTEXT,
    FAULT as FAULT,
    LENGTH as LENGTH,
    PLAIN as PLAIN,
    REASONS as REASONS,
    RUNNING as RUNNING,
    STOP as STOP,
    UNCOUPLED as UNCOUPLED,
    Context as Context,
    Draft as Draft,
    Drafter as Drafter,
    DraftShape as DraftShape,
    DrawKind as DrawKind,
    Draws as Draws,
    Ends as Ends,
    Foreseeing as Foreseeing,
    Host as Host,
    Laws as Laws,
    Mixed as Mixed,
    Outcome as Outcome,
    RowHints as RowHints,
    Scores as Scores,
    StepLists as StepLists,
    StepTensors as StepTensors,
    Tree as Tree,
    Verdict as Verdict,
    Verifier as Verifier,
)
from outrider.types.models import (
    Cache as Cache,
    Encoded as Encoded,
    Inputs as Inputs,
    LanguageModel as LanguageModel,
    MultiModalInputs as MultiModalInputs,
    Nodes as Nodes,
    Output as Output,
    Reads as Reads,
    RowStore as RowStore,
    TargetStates as TargetStates,
    Tokenizer as Tokenizer,
)
