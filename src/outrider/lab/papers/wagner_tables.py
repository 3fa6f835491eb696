"""The tables of `outrider bench wagner` as text: the paper's columns, ours beside them."""

from outrider.certify.report import Row
from outrider.lab.papers.published import WAGNER

_PAPER = (
    "The paper (A100, profiler): summed time -6..-13 % exact, -37..-94 % sigmoid; 4.0-12.0 ms a "
    "step for transformers, 3.6-11.2 exact, 3.1-4.6 sigmoid; 9-63 GB/s realised."
)


def _published(score: str) -> str:
    """What the paper prints for the task that this score is of."""
    head = ["published", f"{score} plain", "exact", "sigmoid", "sum less: exact", "sigmoid",
            "a step: exact", "sigmoid", "wall: exact", "sigmoid"]  # fmt: skip
    rows = [
        [name, *(f"{value:.2f}" for value in scores), *(f"{value:.1f}%" for value in less)]
        for name, scores, less in WAGNER[score]
    ]
    return _table(head, rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, rows)])


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def _name(row: Row) -> str:
    return row["method"] if row["exact"] else f"{row['method']} (lossy)"


def _main(rows: list[Row], score: str) -> str:
    head = ["method", "calls", "sum ms", "less", "ms a step", "less", "wall less", "share of wall",
            "GB/s", "accepted", "formula", score]  # fmt: skip
    return _table(
        head,
        [
            [
                _name(row), str(row["calls"]), f"{row['sum_ms']:.1f}", _percent(row["sum_less"]),
                f"{row['mean_ms']:.3f}±{row['std_ms']:.3f}", _percent(row["mean_less"]),
                _percent(row["wall_less"]), _percent(row["share"]),
                f"{row['bandwidth_gb_s']:.1f}", _percent(row["acceptance"]),
                _percent(row["predicted"]), f"{row['score']:.3f}",
            ]
            for row in rows
        ],
    )  # fmt: skip


def _engine(rows: list[Row], score: str) -> str:
    head = ["arm", "T", score, "seconds", "encoder ms", "decoder ms", "tokens", "tokens a step",
            "alpha"]  # fmt: skip
    return _table(
        head,
        [
            [
                row["arm"], f"{row['temperature']:g}", f"{row['score']:.3f}",
                f"{row['seconds']:.2f}", f"{row['encoder_ms']:.0f}", f"{row['decoder_ms']:.0f}",
                str(row["tokens"]), f"{row['tokens_a_step']:.2f}",
                "" if row["alpha"] is None else f"{row['alpha']:.3f}",
            ]
            for row in rows
        ],
    )  # fmt: skip


def render(document: Row) -> str:
    """All tables."""
    parts = [
        f"{document['pair']}, {document['prompts']} prompts of {document['tokens']} tokens, "
        f"T = 1, {document['device']}, {document['threads']} thread(s), "
        f"sigmoid alpha, beta = -+{document['bound']:.0e}",
        "\nSummed time in the verification function, heuristic gamma (tables 1, 3, 4, 5, 6)",
        _main(document["main"], document["score"]),
        _PAPER,
        _published(document["score"]),
        "`formula` is the mean of min(1, p^/q^) over drafted tokens, what the paper's acceptance "
        "should be near; a position behind a rejection counts as not accepted.",
        "Methods draw different texts from one law, so calls, wall time and score differ by "
        "chance: compare the time of a step.",
        "\nConstant gamma (figure 3, table 8): ms a step / accepted",
    ]
    names = [row["method"] for row in document["main"]]
    gammas = sorted({row["gamma"] for row in document["gamma"]})
    cells = {(row["gamma"], row["method"]): row for row in document["gamma"]}
    parts.append(
        _table(
            ["gamma", *names],
            [
                [
                    str(gamma),
                    *(
                        f"{cells[gamma, name]['mean_ms']:.3f} / "
                        f"{_percent(cells[gamma, name]['acceptance'])}"
                        for name in names
                    ),
                ]
                for gamma in gammas
            ],
        )
    )
    parts.append("The paper's table 8: 46-59 % accepted with the sigmoid, 46-57 % exact.")
    parts += ["\nThe sigmoid's alpha and beta (tables 2, 7)", _table(
        ["method", "sum ms", "less", "accepted", document["score"]],
        [[_name(row), f"{row['sum_ms']:.1f}", _percent(row["sum_less"]),
          _percent(row["acceptance"]), f"{row['score']:.3f}"] for row in document["bounds"]],
    )]  # fmt: skip
    if "memory" in document:
        parts += ["\nMegabytes allocated by one call (figures 4-5)", _table(
            ["method", "gamma 5", "gamma 20"],
            [[name, *(f"{row['mb']:.3f}" for row in document["memory"] if row["method"] == name)]
             for name in names],
        )]  # fmt: skip
    if "engine" in document:
        parts += ["\nWhole recordings by outrider's own transcription (exact)",
                  _engine(document["engine"], document["score"])]  # fmt: skip
    if "large" in document:
        parts += [f"\n{document['large']['pair']}", _main(document["large"]["rows"], "score")]
    return "\n".join(parts)
