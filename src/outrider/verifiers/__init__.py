"""Registry of verification rules: one file and one line each.

A rule of your own is reached by name once it is here: by `outrider.verifiers.register(Mine())`, or
by an entry point in the group `outrider.verifiers`.
"""

import math
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, cast

from outrider import arguments, lazy, plugins
from outrider.errors import ConfigurationError, UnknownName

if TYPE_CHECKING:
    from outrider.types import DrawKind, Verifier

#: What every rule has.
_PARTS = ("name", "exact", "kinds", "chain_only", "outcome", "__call__")


def _rule(given: object) -> "Verifier":
    """What `register` and entry points may give: a rule, or a class of rules with usual values."""
    if isinstance(given, type) and callable(getattr(given, "outcome", None)):
        given = given()
    if isinstance(given, type) or not all(hasattr(given, part) for part in _PARTS):
        what = "a Verifier (name, exact, kinds, chain_only, outcome, and it can be called)"
        arguments.refuse("rule", what, given, "see docs/adding-a-rule.md")
    return cast("Verifier", given)


#: Rules of outrider-lab that change the law.
LOSSY = ("lenience", "lenience_argmax", "sigmoid", "typical")
#: Rules that other distributions bring.
PLUGINS = plugins.PluginGroup("outrider.verifiers", "rule", _rule, ("non_iterative", "otm", *LOSSY))

#: Rules by name, with the usual values of their options; imported when they are looked up.
_BUILTIN = {
    "match": "outrider.verifiers.match:Match()",
    "coupled": "outrider.verifiers.match:COUPLED",
    "rejection": "outrider.verifiers.rejection:Rejection()",
    "block": "outrider.verifiers.block:BlockVerifier()",
    "traversal": "outrider.verifiers.traversal:Traversal()",
    "hub": "outrider.verifiers.rejection:HubVerifier()",
    "multi_round": "outrider.verifiers.rejection:MULTI_ROUND",
    "kseq": "outrider.verifiers.kseq:KSeq()",
}
VERIFIERS: MutableMapping[str, "Verifier"] = lazy.Registry(_BUILTIN, PLUGINS.load)

#: What a rule says of itself; its other fields are options.
ABOUT = ("name", "exact", "kinds", "chain_only")


def register(rule: "Verifier") -> None:
    """Make a rule known by its name to `load`, `model.generate`, the commands and `certify`.

    Raises ConfigurationError for a name that is taken, and for what is no rule.

    >>> from outrider.verifiers.tree_walk import AliasedVerifier
    >>> register(AliasedVerifier("mine", get("match"), get("match").kinds))
    >>> VERIFIERS.pop("mine").name
    'mine'
    """
    read = _rule(rule)
    PLUGINS.refuse_taken(read.name, VERIFIERS)
    VERIFIERS[read.name] = read


def get(name: str, /, **options: object) -> "Verifier":
    """The rule of that name, with other values for its options: `get("lenience", lenience=0.3)`."""
    if name not in VERIFIERS:
        PLUGINS.refuse_broken(name)
        lossy = [rule.name for rule in VERIFIERS.values() if not rule.exact]
        raise UnknownName("rule", name, VERIFIERS, lossy)
    rule = VERIFIERS[name]
    if not options:
        return rule
    usual = options_of(rule)
    for option, value in options.items():
        if option not in usual:
            takes = ", ".join(f"{n} (usually {v!r})" for n, v in usual.items()) or "no options"
            raise ConfigurationError(
                f"rule {name!r} has no use for {option}; got {option}={arguments.shown(value)}; "
                f"it takes {takes}; leave {option} out"
            )
        if arguments.is_number(usual[option]):
            do = f"leave it out for {usual[option]!r}"
            number = arguments.number(option, value, "a finite number", do)
            if not math.isfinite(number):
                arguments.refuse(option, "a finite number", value, do)
            options[option] = number
    if not is_dataclass(rule) or isinstance(rule, type):
        return rule
    return replace(rule, **options)


def options_of(rule: "Verifier") -> dict[str, object]:
    """The options of a rule and their values."""
    if not is_dataclass(rule):
        return {}
    return {f.name: vars(rule)[f.name] for f in fields(rule) if f.init and f.name not in ABOUT}


def chosen(
    rule: "str | Verifier | None", options: Mapping[str, object] | None, shared_noise: bool
) -> "Verifier | None":
    """The rule that a user asks for: by name with options, as an object, or not at all.

    Coupled text depends on the seed alone: `match` if no rule is named, and no rule that cannot
    give it.

    >>> chosen(None, None, shared_noise=True).name
    'match'
    """
    asked = arguments.by_name("rule_options", options)
    if asked and not isinstance(rule, str):
        able = {name: ", ".join(options_of(other)) for name, other in VERIFIERS.items()}
        takes = "; ".join(f"{name}: {names}" for name, names in able.items() if names)
        raise ConfigurationError(
            f"rule_options belong to a rule by name; got {arguments.shown(asked)} and "
            f"rule={arguments.shown(rule)}; name the rule ({takes})"
        )
    verifier = get(rule, **asked) if isinstance(rule, str) else named(rule)
    if not shared_noise:
        return verifier
    if verifier is not None and not shares_noise(verifier):
        sharing = ", ".join(sorted(n for n, other in VERIFIERS.items() if shares_noise(other)))
        raise ConfigurationError(
            f"rule {verifier.name!r} cannot verify coupled drafts so that the text depends on the "
            f"seed alone; got shared_noise=True; leave the rule out, or use one that can: {sharing}"
        )
    return verifier or get("match")


def shares_noise(rule: "Verifier") -> bool:
    """Whether text that it verifies depends on the seed alone."""
    from outrider.types import DrawKind

    return rule.exact and DrawKind.COUPLED in rule.kinds


def named(rule: "str | Verifier | None") -> "Verifier | None":
    """A rule that was given by name, as an object, or not at all."""
    if rule is None:
        return None
    if isinstance(rule, str):
        return get(rule)
    if not hasattr(rule, "outcome") or isinstance(rule, type):
        arguments.refuse("rule", "a Verifier", rule, "take one by name, verifiers.get('block')")
    return rule


def names() -> list[str]:
    """All by name, those of plug-ins too; one of outrider-lab's that changes the law says so.

    Nothing is imported for this.

    >>> "block" in names()
    True
    """
    every = {*_BUILTIN, *PLUGINS.names()}
    return sorted(f"{name} (lossy)" if name in LOSSY else name for name in every)


def listed(rules: "Iterable[Verifier]") -> list[str]:
    """Names in order; a rule that changes the law says so."""
    return sorted(rule.name if rule.exact else f"{rule.name} (lossy)" for rule in rules)


def supports(rule: "Verifier", kinds: "frozenset[DrawKind]", is_chain: bool) -> bool:
    """Whether a rule can verify drafts with these kinds of children.

    On a chain there is one draw at a node: with and without replacement are the same.
    """
    from outrider.types import DrawKind

    if is_chain and rule.kinds & {DrawKind.WITHOUT, DrawKind.WITH}:
        kinds = kinds - {DrawKind.WITHOUT, DrawKind.WITH}
    return kinds <= rule.kinds and (is_chain or not rule.chain_only)


def check(rule: "Verifier", kinds: "frozenset[DrawKind]", is_chain: bool, drafter: str) -> None:
    """Refuse a rule that cannot verify the drafts of a drafter, naming those that can."""
    if supports(rule, kinds, is_chain):
        return
    able = listed(r for r in VERIFIERS.values() if supports(r, kinds, is_chain))
    drawn = ", ".join(sorted(kind.name.lower() for kind in kinds)) or "no"
    shape = "chain" if is_chain else "tree"
    raise ConfigurationError(
        f"rule {rule.name!r} cannot verify a {shape} of {drawn} children as drafter {drafter!r} "
        f"proposes; rules that can: {', '.join(able)}"
    )


def default(kinds: "frozenset[DrawKind]", is_chain: bool = False) -> "Verifier":
    """The rule of a drafter that names none. Always exact, and always able to verify its drafts.

    Point masses, coupled drafts and the bare root: match. A sampled chain: block verification.
    Independent children in a tree: K-SEQ. Any other sampled tree: traversal, which on a chain is
    block verification; so a caller who does not know the shape need not say it.
    """
    from outrider.types import DrawKind

    drawn = kinds & {DrawKind.WITHOUT, DrawKind.WITH}
    if not drawn or DrawKind.COUPLED in kinds:
        return VERIFIERS["match"]
    if is_chain:
        return VERIFIERS["block"]
    return VERIFIERS["kseq" if drawn == {DrawKind.WITH} else "traversal"]
