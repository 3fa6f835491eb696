"""What tests cost, in seconds of the processor: the load of the machine is not in them."""

import collections
import resource

#: What this process had spent when the last report was made.
spent = 0.0
_by_test = collections.Counter()


def processor_seconds():
    """Of this process and of those that it has started and seen end."""
    own, others = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def add(test, seconds):
    """One of a test's three reports."""
    _by_test[test.partition("[")[0]] += seconds


def told(dearest=12):
    """The sum, folders and the dearest tests with all of their cases, in three lines."""
    folders = collections.Counter()
    for test, seconds in _by_test.items():
        path = test.partition("::")[0].split("/")
        folders[path[-2] if len(path) > 2 else path[-1]] += seconds
    return "\n".join(
        (
            f"processor seconds of tests: {folders.total():.0f}",
            ", ".join(f"{name} {seconds:.0f}" for name, seconds in folders.most_common()),
            "dearest: "
            + ", ".join(
                f"{name.removeprefix('tests/')} {seconds:.1f}"
                for name, seconds in _by_test.most_common(dearest)
            ),
        )
    )
