"""Registry of verification rules: one file and one line each."""

from outrider.errors import ConfigurationError, UnknownName
from outrider.types import Kind, Verifier
from outrider.verifiers.match import Match
from outrider.verifiers.rejection import Rejection

VERIFIERS: dict[str, Verifier] = {rule.name: rule for rule in (Match(), Rejection())}


def get(name: str) -> Verifier:
    """The rule of that name."""
    if name not in VERIFIERS:
        raise UnknownName("rule", name, VERIFIERS)
    return VERIFIERS[name]


def judges(rule: Verifier, kinds: frozenset[Kind], is_chain: bool) -> bool:
    """Whether a rule can judge drafts with these kinds of children."""
    return kinds <= rule.kinds and (is_chain or not rule.chain_only)


def check(rule: Verifier, kinds: frozenset[Kind], is_chain: bool, drafter: str) -> None:
    """Refuse a rule that cannot judge the drafts of a drafter, naming those that can."""
    if judges(rule, kinds, is_chain):
        return
    able = [r.name for r in VERIFIERS.values() if judges(r, kinds, is_chain)]
    drawn = ", ".join(sorted(kind.name.lower() for kind in kinds)) or "no"
    shape = "chain" if is_chain else "tree"
    raise ConfigurationError(
        f"rule {rule.name!r} cannot judge a {shape} of {drawn} children as drafter {drafter!r} "
        f"proposes; rules that can: {', '.join(sorted(able))}"
    )


def default(kinds: frozenset[Kind]) -> Verifier:
    """Point masses, coupled drafts and the bare root: match. Drawn children: rejection."""
    drawn = kinds & {Kind.WITHOUT, Kind.WITH}
    return VERIFIERS["rejection"] if drawn else VERIFIERS["match"]
