"""Checks at load: one vocabulary, one device, trees that score as paths do, equal encoders."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.errors import ConfigurationError, NumericalError, UnsupportedModel, VocabularyMismatch
from outrider.models import TreeDecoder, weight_only
from outrider.models.config import read
from outrider.models.decoder import media_of
from outrider.models.prefill import causal, ingest, of_tree
from outrider.models.token_bytes import name_of
from outrider.tree import branching, chain
from outrider.types import (
    Encoded,
    Inputs,
    LanguageModel,
    MultiModalInputs,
    RowStore,
    Tokenizer,
    Tree,
)

# Encoders that two models have in common: one runs, both decoders attend to its states.


def same_encoder(target: PreTrainedModel, draft: PreTrainedModel) -> bool:
    """Whether the encoders are of one class with equal weights, bit by bit."""
    mine, theirs = target.get_encoder(), draft.get_encoder()
    if type(mine) is not type(theirs):
        return False
    ours, others = mine.state_dict(), theirs.state_dict()
    if {name: t.shape for name, t in ours.items()} != {name: t.shape for name, t in others.items()}:
        return False
    return all(torch.equal(weight, others[name]) for name, weight in ours.items())


CAPACITY = 128
_LONG = 70  #: tokens of a text that is longer than what layers with states read at once
_ADVICE = (
    "give a draft model with another tokenizer together with that tokenizer, draft_tokenizer=..., "
    "use one with the target's, or drafter='prompt_lookup', or drafter='reference_lookup' to copy "
    "from the other model's text"
)


def vocabulary(
    target_tokenizer: Tokenizer | None, draft_tokenizer: Tokenizer | None, sizes: dict[str, int]
) -> int:
    """The common vocabulary size: both outputs are cut to the tokenizer's.

    Output layers are often padded beyond the tokenizer (to multiples of 64, differently for each
    model of a family); the padding is never a token. Raises VocabularyMismatch and names the first
    difference.
    """
    if target_tokenizer is None:
        if len(set(sizes.values())) > 1:
            raise VocabularyMismatch(
                f"output sizes differ: {sizes}; without a tokenizer it is unknown which ids are "
                "real; pass tokenizer=..."
            )
        return next(iter(sizes.values()))
    known = target_tokenizer.get_vocab()
    if draft_tokenizer is not None:
        other = draft_tokenizer.get_vocab()
        if other != known:
            names = name_of(target_tokenizer), name_of(draft_tokenizer)
            raise VocabularyMismatch(
                f"the tokenizers of target and draft model, {' and '.join(names)}, differ, and "
                f"only models of text alone are translated; {_difference(known, other)}; use a "
                "draft model with the target's tokenizer, or a drafter without one"
            )
    real: int = max(known.values()) + 1
    for name, size in sizes.items():
        if name != "target" and size < real:
            raise VocabularyMismatch(
                f"the {name} model has {size} outputs, but the tokenizer has {real} tokens; "
                f"{_ADVICE}"
            )
    return min(real, sizes["target"])


def _difference(target: dict[str, int], draft: dict[str, int]) -> str:
    only = sorted(target.keys() ^ draft.keys(), key=lambda t: (target.get(t, draft.get(t, 0)), t))
    moved = [t for t in target.keys() & draft.keys() if target[t] != draft[t]]
    parts = [f"the target has {len(target)} tokens, the draft model {len(draft)}"]
    if only:
        token = only[0]
        owner = "target" if token in target else "draft model"
        parts.append(f"{len(only)} tokens exist on one side only, first {token!r} ({owner})")
    if moved:
        token = min(moved, key=lambda t: target[t])
        parts.append(
            f"{len(moved)} tokens have different ids, first {token!r}: "
            f"{target[token]} against {draft[token]}"
        )
    return "; ".join(parts)


def draft_tokenizer(given: object, drafts: Sequence[object]) -> None:
    """Refuse a draft model's tokenizer without a draft model: ConfigurationError."""
    if given is not None and not drafts:
        raise ConfigurationError(
            f"draft_tokenizer is for a draft model; got {type(given).__name__} and no draft model; "
            "leave it out, or give draft=..."
        )


def ordinary(numbers: Tensor, vocab: int) -> Tensor:
    """Token ids that are no padding: there are families that give padding no position."""
    first = 5 if vocab > 10 else 0
    return first + numbers % (vocab - first)


def _allowed(model: LanguageModel) -> float:
    """The largest difference, relative to the largest logit, that is this model's rounding.

    A tree's sums have another order than a path's in attention, and by products that round what
    they are given to bfloat16 a last bit shows as half precision. So it does in states by products
    of whole numbers, which keep 16 bits.
    """
    coarse = model.dtype in (torch.bfloat16, torch.float16)
    if isinstance(model, TreeDecoder):
        network = read(model.runner, "model", torch.nn.Module)
        kept = {} if network is None else weight_only.formats(network)
        coarse |= "bf16" in kept or (model.recurrent and any(name != "f32" for name in kept))
    return 0.1 if coarse else 1e-3


@torch.inference_mode()
def adapters(model: TreeDecoder, name: str) -> float:
    """Compare rows with all adapters side by side with each alone; UnsupportedModel if they differ.

    Returns the largest difference, relative to the largest logit.
    """
    rows = (None, *model.adapters)
    tokens_BQ = ordinary(torch.arange(6, device=model.device) * 7, model.vocab_size)[None]
    at_BQ = torch.arange(6, device=model.device)[None]

    def scores(names: tuple[str | None, ...]) -> Tensor:
        cache = model.open(len(names), CAPACITY)
        cache.adapters = names
        wide = model.width(6)
        tokens, at = (x.expand(len(names), -1) for x in (tokens_BQ, at_BQ))
        return model.forward(cache, causal(tokens, at, wide)).logits_BQV

    together = scores(rows)
    each = zip(rows, together, strict=True)
    worst = max(_gap(whole[None], scores((row,))) for row, whole in each)
    if worst > _allowed(model):
        raise UnsupportedModel(
            f"the {name} model ({model.runner.name}) does not score rows with adapters side by "
            f"side as each alone: relative difference {worst:.3g}; give one adapter as the target: "
            "it is merged"
        )
    return worst


@torch.inference_mode()
def trees(model: LanguageModel, name: str) -> float:
    """Compare a small tree's scores with one forward per path; UnsupportedModel if they differ.

    Catches models that ignore the mask or the positions without any error. Returns the largest
    difference relative to the largest logit.
    """
    device = torch.device(model.device)
    tree = branching((2, 2), device)
    tolerance, prefix = _allowed(model), 6
    steps = torch.arange(prefix + tree.nodes, device=device)
    tokens = ordinary(steps * 7, model.vocab_size)[None]

    # What a path leaves in the cache is written over by the next: the prefix is read once.
    cache: RowStore = model.open(1, CAPACITY, model.probe(1))
    model.forward(cache, causal(tokens[:, :prefix], steps[None, :prefix], CAPACITY), last=1)
    first = torch.tensor([prefix], device=device)
    drafted = tokens[:, prefix:]
    whole = model.forward(cache, of_tree(drafted, tree, first, CAPACITY)).logits_BQV
    worst = 0.0
    for leaf in range(tree.levels[-2], tree.nodes):
        path = tree.ancestors_BNN[0, leaf].nonzero()[:, 0]
        line = prefix + torch.arange(len(path), device=device)[None]
        single = model.forward(cache, causal(drafted[:, path], line, CAPACITY)).logits_BQV
        worst = max(worst, _gap(whole[:, path], single))
    if not worst <= tolerance:
        raise UnsupportedModel(
            f"the {name} model does not score trees as paths: relative difference {worst:.3g}, "
            f"allowed {tolerance:.3g}; its attention ignores the tree's mask or positions; use a "
            "chain drafter with another attention implementation, or another model"
        )
    return worst


@torch.inference_mode()
def paths(model: TreeDecoder, name: str) -> float | None:
    """Compare a tree's scores with the model's own forward of each path, past its window.

    Two rows of different lengths, one tree each, windows narrowed for the moment so that a short
    text reaches past them. Returns None for a runner that cannot run the model by its own means,
    else the largest difference relative to the largest logit. Raises UnsupportedModel if it is too
    large or if the model cannot run this way at all.
    """
    runner = model.runner
    tolerance = _allowed(model)
    try:
        with runner.short_windows(4):
            counts = (2, 2) if model.trees else (1, 1, 1)
            worst = _paths(model, branching(counts, torch.device(model.device)))
            if runner.recurrent and worst is not None:
                worst = max(worst, _rounds(model))
    except (UnsupportedModel, NumericalError):
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"the {name} model ({runner.name}) cannot be driven with a cache, "
            f"masks and positions of ours: {type(error).__name__}: {str(error)[:160]}; use "
            "another model"
        ) from error
    if worst is not None and not worst <= tolerance:
        raise UnsupportedModel(
            f"the {name} model ({runner.name}) does not score "
            f"{'trees as paths' if model.trees else 'chains as its own forward does'}: relative "
            f"difference {worst:.3g}, allowed {tolerance:.3g}; its attention, or a layer that "
            "looks at the whole call, ignores what it is given; use another model or attention "
            "implementation"
        )
    return worst


@torch.inference_mode()
def media(model: LanguageModel, prompt: Sequence[int], inputs: MultiModalInputs) -> float:
    """Compare a branch of a tree behind a prompt with images with the model's own forward of all.

    Once for each kind of inputs: 0.0 if that was done before. Returns the largest difference,
    relative to the largest logit; UnsupportedModel if it is too large, PromptError if the model
    cannot read these inputs.
    """
    reader, kind = media_of(model), frozenset(inputs.kwargs)
    if not isinstance(model, TreeDecoder) or reader is None or kind in reader.known:
        return 0.0
    device, length = torch.device(model.device), len(prompt)
    tree = branching((2, 1), device)
    capacity = model.width(length + tree.nodes + 1)
    cache, size = model.open(1, capacity), length - 1
    read, _ = reader.read_media(cache, prompt, inputs)
    text = torch.tensor([prompt], device=device)
    ingest(model, cache, text, size, settled_B=text.new_full((1,), size), start=min(read, size))
    steps = torch.arange(tree.nodes, device=device)
    drafted = ordinary(steps * 7 + 3, model.vocab_size)[None]
    drafted[:, 0] = text[:, -1]
    nodes = of_tree(drafted, tree, text.new_full((1,), size), capacity)
    path = tree.ancestors_BNN[0, -1].nonzero()[:, 0]
    scores = model.forward(cache, nodes).logits_BQV[0, path]
    whole = torch.cat([text[:, :-1], drafted[:, path]], 1)
    logits = reader.plain_media(whole, inputs)
    worst = _gap(scores, logits[0, size:, : model.vocab_size])
    allowed = _allowed(model)
    if not worst <= allowed:
        raise UnsupportedModel(
            f"{model.runner.name} does not score trees behind a prompt with "
            f"{', '.join(sorted(kind))} as its own forward does: relative difference "
            f"{worst:.3g}, allowed {allowed:.3g}; use another model, or prompts of text alone"
        )
    reader.known.add(kind)
    return worst


def _paths(model: TreeDecoder, tree: Tree) -> float | None:
    device = torch.device(model.device)
    lengths = [9, 6]
    longest, made_up = max(lengths), model.probe(len(lengths))
    inputs: Inputs | None = None  #: as the encoder has read them, once anything is compared
    heard = range(1)  #: the rows whose source both forwards read
    steps = torch.arange(longest + tree.nodes, device=device)
    tokens = ordinary(torch.stack([steps * 7, steps * 5 + 4]), model.vocab_size)
    drafted = tokens.flip(1)[:, : tree.nodes]
    lines: list[tuple[int, Tensor, Tensor]] = []
    for row, length in enumerate(lengths):
        for node in range(tree.levels[-2], tree.nodes):
            path = tree.ancestors_BNN[0, node].nonzero()[:, 0]
            whole = torch.cat([tokens[row, :length], drafted[row, path]])[None]
            if made_up is not None and inputs is None and lines:  # who has no forward reads nothing
                inputs, heard = _read_both(model, made_up)
            given = None if inputs is None else inputs.take([row])
            if made_up is not None and row in heard and node == tree.levels[-2]:
                given = _raw(model, made_up.take([row]))  # once a row: an encoder takes longest
            logits = model.runner.plain(whole, given)
            if logits is None:
                return None
            lines.append((row, path, logits[0, length:, : model.vocab_size]))
    cache = model.open(len(lengths), CAPACITY, inputs)
    at = steps[:longest].expand(len(lengths), -1)
    first = torch.tensor(lengths, device=device)
    model.forward(cache, causal(tokens[:, :longest], at, CAPACITY, first), last=1)
    scores = model.forward(cache, of_tree(drafted, tree, first, CAPACITY)).logits_BQV
    # a token alone, as in plain decoding: there are models that look at no mask then
    lone = model.forward(cache, causal(drafted[:, :1], first[:, None], CAPACITY)).logits_BQV
    gaps = [_gap(scores[row, path], logits) for row, path, logits in lines]
    return max(*gaps, *(_gap(lone[row, :1], logits[:1]) for row, _, logits in lines))


def _rounds(model: TreeDecoder) -> float:
    """What layers with states have to get right besides: text that is kept, and text that is not.

    Two rows, one of them longer than the pieces that texts are read in; a tree of which they keep
    unequal paths, a chain that is rejected in part, a tree. The last nodes of each are compared.
    """
    device = torch.device(model.device)
    steps, lengths = torch.arange(_LONG, device=device), [_LONG, 6]
    text = ordinary(torch.stack([steps * 7, steps * 5 + 4]), model.vocab_size)
    first = torch.tensor(lengths, device=device)
    inputs = model.probe(2)
    if inputs is not None:
        inputs = model.encode(_raw(model, inputs))
    cache = model.open(2, 2 * CAPACITY, inputs)
    at = steps.expand(2, -1)
    model.forward(cache, causal(text, at, 2 * CAPACITY, first), last=1)
    texts = [text[row, :length] for row, length in enumerate(lengths)]
    worst, tree = 0.0, branching((2, 2), device)
    for drafted, kept in ((tree, [[1, 4], [-1, -1]]), (chain(4, device), [[1], [1]]), (tree, [])):
        steps = torch.arange(drafted.nodes, device=device)
        guesses = ordinary(torch.stack([steps * 11 + 2, steps * 3]), model.vocab_size)
        nodes = of_tree(guesses, drafted, first, 2 * CAPACITY)
        scores = model.forward(cache, nodes).logits_BQV
        path = drafted.ancestors_BNN[0, -1].nonzero()[:, 0]
        for row, known in enumerate(texts):
            whole = torch.cat([known, guesses[row, path]])[None]
            logits = model.runner.plain(whole, None if inputs is None else inputs.take([row]))
            assert logits is not None
            expected = logits[0, len(known) :, : model.vocab_size]
            worst = max(worst, _gap(scores[row, path], expected))
        if not kept:
            break
        if not drafted.is_chain:
            model.keep(cache, first, torch.tensor(kept, device=device))
        some = [[0, *[node for node in nodes if node >= 0]] for nodes in kept]
        texts = [torch.cat([t, g[n]]) for t, g, n in zip(texts, guesses, some, strict=True)]
        first = torch.tensor([len(known) for known in texts], device=device)
    return worst


def _raw(model: TreeDecoder, inputs: Inputs) -> Inputs:
    """The inputs as they come, to be read by the model's own encoder if it has one."""
    return inputs._replace(encoded=None) if model.reads == "source" else inputs


def _read_both(model: TreeDecoder, made_up: Inputs) -> tuple[Inputs, range]:
    """Two rows as the encoder reads them, and which it has read: the first at least."""
    one, other = (made_up.take([row]) for row in range(2))
    if not bool(made_up.mask_BS.all()):
        return model.encode(_raw(model, made_up)), range(2)
    first = model.encode(_raw(model, one))
    if _alike(first.encoded, other.encoded):  # no padding to mistake: made-up states do for a row
        return first.put([1], other), range(1)
    return first.put([1], model.encode(_raw(model, other))), range(2)


def _alike(one: Encoded | None, other: Encoded | None) -> bool:
    """Whether both are states of one shape, all of them there."""
    if one is None or other is None or one.states_BTE.shape != other.states_BTE.shape:
        return False
    return bool(one.mask_BT.all() & other.mask_BT.all())


def _gap(scores: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest logit expected."""
    if bool((scores.isnan() | scores.isposinf() | expected.isnan() | expected.isposinf()).any()):
        raise NumericalError("a logit is NaN or infinite")
    never = torch.isneginf(expected)  # tokens that a draft's output layer does not know
    if not torch.equal(never, torch.isneginf(scores)):
        return torch.inf
    scores, expected = (x.float().masked_fill(never, 0.0) for x in (scores, expected))
    gap = (scores - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    return float(gap if torch.isfinite(gap) else torch.inf)
