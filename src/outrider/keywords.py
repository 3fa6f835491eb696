"""Other libraries' names for what `outrider.load` takes: vLLM's, transformers' and our own.

    outrider.load(target, **load_arguments({"model": draft, "num_speculative_tokens": 5}))
    outrider.load(target, **load_arguments({"method": "ngram", "prompt_lookup_max": 4}))
    outrider.load(target, **load_arguments({"assistant_model": draft, "num_assistant_tokens": 5}))

What cannot be honoured is an error, never dropped.
"""

from collections.abc import Callable, Mapping
from typing import Any

from outrider import arguments
from outrider.drafters import DRAFTERS, PLUGINS
from outrider.errors import ConfigurationError, UnknownName
from outrider.load_config import OPTIONS, RUNTIME

#: What drafts and what judges: all but the target, and how models run.
OURS = tuple(name for name in OPTIONS if name not in RUNTIME)
NGRAM = "ngram"  #: vLLM's name for prompt lookup; its other methods have our names
RULES = {"standard": "rejection", "strict": "rejection", "block": "block"}
#: Names that a generation configuration of transformers carries.
CONFIGURED = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_ensemble_weight",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
)
KNOWN = (
    *OURS,
    "model",
    "draft_model",
    "method",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "rejection_sample_method",
    "draft_sample_method",
    "assistant_model",
    "assistant_tokenizer",
    *CONFIGURED,
)


def load_arguments(given: Mapping[str, object]) -> dict[str, Any]:
    """Arguments of `outrider.load` from a `speculative_config` or transformers' keywords.

    >>> load_arguments({"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3})
    {'num_speculative_tokens': 6, 'drafter': 'prompt_lookup', 'ngram': (1, 3)}
    """
    for key in given:
        if key not in KNOWN:
            raise UnknownName("speculative setting", key, KNOWN)
    asked = {key: value for key, value in given.items() if value is not None}
    found: dict[str, Any] = {key: asked[key] for key in OURS if key in asked}

    def put(name: str, value: object, source: str) -> None:
        if name in found and found[name] is not value and found[name] != value:
            raise ConfigurationError(
                f"{source}={value!r} contradicts {name}={found[name]!r}; give one of them"
            )
        found[name] = value

    for name in ("model", "draft_model", "assistant_model"):
        if name in asked:
            put("draft", asked[name], name)
    if "assistant_tokenizer" in asked:
        put("draft_tokenizer", asked["assistant_tokenizer"], "assistant_tokenizer")
    for name in ("num_assistant_tokens", "prompt_lookup_num_tokens"):
        if name in asked:
            count = arguments.whole(name, asked[name], "give at least 1, or leave it out", least=1)
            put("num_speculative_tokens", count, name)
    if "method" in asked:
        method = str(asked["method"])
        if method not in (NGRAM, *DRAFTERS):
            PLUGINS.refuse_broken(method)
            raise UnknownName("speculative method", method, (NGRAM, *DRAFTERS))
        put("drafter", "prompt_lookup" if method == NGRAM else method, "method")
    if "prompt_lookup_num_tokens" in asked:
        put("drafter", "prompt_lookup", "prompt_lookup_num_tokens")
    if isinstance(found.get("ngram"), list):
        found["ngram"] = tuple(found["ngram"])  # as the other names for it are read
    _ngram(asked, put)
    if "rejection_sample_method" in asked:
        method = str(asked["rejection_sample_method"])
        if method not in RULES:
            raise UnknownName("rejection_sample_method", method, RULES)
        put("rule", RULES[method], "rejection_sample_method")
    _refuse(asked)
    return found


def _ngram(asked: Mapping[str, object], put: Callable[[str, object, str], None]) -> None:
    """The n-grams of prompt lookup, under the names that vLLM and transformers have for them."""
    sizes = {
        name: arguments.whole(name, asked[name], "give at least 1, or leave it out", least=1)
        for name in ("prompt_lookup_min", "prompt_lookup_max", "max_matching_ngram_size")
        if name in asked
    }
    if not sizes:
        return
    least = sizes.pop("prompt_lookup_min", 1)
    for name, most in (sizes or {"prompt_lookup_min": max(4, least)}).items():
        if most < least:
            what = f"a whole number of at least prompt_lookup_min, {least}"
            arguments.refuse(name, what, most, "lower prompt_lookup_min")
        put("ngram", (least, most), name)


def _refuse(asked: Mapping[str, object]) -> None:
    if asked.get("draft_sample_method", "probabilistic") != "probabilistic":
        raise ConfigurationError(
            "draft_sample_method must be 'probabilistic': drafts are drawn from the draft model's "
            f"own law; got {asked['draft_sample_method']!r}; leave it out"
        )
    if asked.get("num_assistant_tokens_schedule", "constant") != "constant":
        raise ConfigurationError(
            "num_assistant_tokens_schedule must be 'constant'; got "
            f"{asked['num_assistant_tokens_schedule']!r}; set num_assistant_tokens alone"
        )
    if asked.get("assistant_confidence_threshold", 0):
        raise ConfigurationError(
            "assistant_confidence_threshold is not supported: drafts have a fixed length; got "
            f"{asked['assistant_confidence_threshold']!r}; leave it out"
        )
    if asked.get("assistant_ensemble_weight") is not None:
        raise ConfigurationError(
            "assistant_ensemble_weight changes the law of the text; got "
            f"{asked['assistant_ensemble_weight']!r}; leave it out, or ask for a lossy rule by name"
        )
