"""Values printed in the papers, to stand beside ours. Their models, tasks and machines differ."""

#: Jeon et al. 2024, tables 1 and 28: Llama 2-7B with a 115 M draft, XSum, T = 0.3, A100; group ->
#: method -> (tree, block efficiency, MBSU, tokens/s), the tree of the best block efficiency.
RSD_LENGTH: dict[int, dict[str, tuple[str, float, float, float]]] = {
    2: {
        "SD": ("2", 2.166, 2.093, 51.515),
        "SpecTr": ("3x2", 2.279, 2.202, 53.346),
        "RSD-C": ("2-2", 2.398, 2.317, 56.609),
        "RSD-S": ("3x2", 2.432, 2.350, 55.465),
    },
    3: {
        "SD": ("3", 2.465, 2.343, 54.195),
        "SpecTr": ("4x3", 2.718, 2.583, 56.688),
        "RSD-C": ("2-2-2", 2.868, 2.726, 59.879),
        "RSD-S": ("4x3", 2.970, 2.823, 61.937),
    },
    4: {
        "SD": ("4", 2.728, 2.551, 53.731),
        "SpecTr": ("7x4", 3.093, 2.892, 60.053),
        "RSD-C": ("2-2-2-2", 3.205, 2.997, 61.723),
        "RSD-S": ("7x4", 3.535, 3.306, 64.456),
    },
    5: {
        "SD": ("5", 2.865, 2.636, 53.199),
        "SpecTr": ("12x5", 3.425, 3.152, 60.133),
        "RSD-C": ("2-2-2-2-2", 3.492, 3.213, 62.753),
        "RSD-S": ("6x5", 3.811, 3.507, 65.16),  # the row of 12x5 is missing in our copy
    },
}

RSD_BUDGET: dict[int, dict[str, tuple[str, float, float, float]]] = {
    6: {
        "SD": ("6", 3.087, 2.796, 53.455),
        "SpecTr": ("2x3", 2.577, 2.450, 54.070),
        "RSD-C": ("2-1-1", 2.571, 2.444, 55.296),
        "RSD-S": ("2x3", 2.791, 2.653, 56.179),
    },
    10: {
        "SD": ("10", 3.438, 2.929, 44.156),
        "SpecTr": ("2x5", 3.030, 2.788, 54.224),
        "RSD-C": ("2-1-1-1-1", 3.021, 2.780, 54.235),
        "RSD-S": ("2x5", 3.300, 3.036, 55.787),
    },
    14: {
        "SD": ("14", 3.565, 2.868, 37.602),
        "SpecTr": ("2x7", 3.296, 2.939, 50.642),
        "RSD-C": ("2-1-1-1-1-1-1", 3.250, 2.898, 50.267),
        "RSD-S": ("2x7", 3.586, 3.198, 53.409),
    },
    21: {
        "SD": ("21", 3.677, 2.695, 30.002),
        "SpecTr": ("3x7", 3.494, 3.116, 51.744),
        "RSD-C": ("3-1-1-1-1-1-1", 3.326, 2.966, 51.650),
        "RSD-S": ("3x7", 3.918, 3.494, 57.997),
    },
    30: {
        "SD": ("30", 3.743, 2.462, 22.927),
        "SpecTr": ("5x6", 3.353, 3.037, 55.070),
        "RSD-C": ("5-1-1-1-1-1", 3.222, 2.918, 52.738),
        "RSD-S": ("5x6", 3.959, 3.585, 62.351),
    },
}

#: tokens/s of plain decoding beside those tables
RSD_PLAIN_RATE = {"draft-length": 37.269, "budget": 37.566}

#: Leviathan et al. 2023, table 3: target -> model -> (T = 0, T = 1).
LEVIATHAN_ALPHA = {
    "GPT-like 97M": {
        "unigram": (0.03, 0.03),
        "bigram": (0.05, 0.05),
        "GPT-like 6M": (0.88, 0.89),
    },
    "T5-XXL, translation": {
        "unigram": (0.08, 0.07),
        "bigram": (0.20, 0.19),
        "T5-small": (0.75, 0.62),
        "T5-base": (0.80, 0.68),
        "T5-large": (0.82, 0.71),
    },
    "T5-XXL, summaries": {
        "unigram": (0.13, 0.08),
        "bigram": (0.23, 0.16),
        "T5-small": (0.65, 0.53),
        "T5-base": (0.73, 0.55),
        "T5-large": (0.74, 0.56),
    },
    "LaMDA 137B": {
        "LaMDA 100M": (0.61, 0.57),
        "LaMDA 2B": (0.71, 0.71),
        "LaMDA 8B": (0.75, 0.74),
    },
}

#: Table 4 (and 2): task, model, T, gamma, alpha, c, expected and measured improvement; T5-XXL.
LEVIATHAN_SPEED = [
    ("translation", "T5-small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    ("translation", "T5-base", 0, 7, 0.80, 0.04, 3.3, 2.8),
    ("translation", "T5-large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    ("translation", "T5-small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    ("translation", "T5-base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    ("translation", "T5-large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    ("summaries", "T5-small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    ("summaries", "T5-base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    ("summaries", "T5-large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    ("summaries", "T5-small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    ("summaries", "T5-base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    ("summaries", "T5-large", 1, 3, 0.56, 0.11, 1.6, 1.7),
]

#: Table 5 and section A.5: T -> model -> alpha by lenience 1, 0.5, 0.3, 0.1; translation.
LEVIATHAN_LENIENCE = {
    0.0: {"T5-small": (0.75, 0.75, 0.80, 0.87)},
    1.0: {
        "unigram": (0.07, 0.10, 0.11, 0.16),
        "bigram": (0.19, 0.23, 0.25, 0.32),
        "T5-small": (0.62, 0.71, 0.76, 0.84),
        "T5-base": (0.68, 0.80, 0.83, 0.90),
    },
}

#: Section A.5: T -> improvement of T5-small by lenience, computed by its authors for c = 0.015
#: (T = 0: gamma 8; T = 1: gamma not given, and above the formula at any gamma, docs/theory.md).
LEVIATHAN_LENIENCE_SPEED = {0.0: (3.3, 3.3, 3.9, 4.9), 1.0: (2.5, 3.1, 3.6, 5.0)}

#: Chen et al. 2023, table 1 (K = 4): task -> ms per token without and with speculation.
CHEN = {
    "XSum nucleus": (14.1, 7.52),
    "XSum greedy": (14.1, 7.00),
    "HumanEval nucleus": (14.1, 5.73),
}

#: Figure 1 prints no numbers.
CHEN_FIGURE = (
    "figure 1: XSum, nucleus: fastest at K = 3; deviation and time of a loop grow with K, "
    "tokens per call / (K + 1) falls"
)

#: Wagner et al. 2024, tables 1, 5 and 6: score -> target and data, that score for transformers,
#: exact and sigmoid; how much less time, in percent, exact and sigmoid take in the function (table
#: 1), a step (6), by the clock (5). A100; the sigmoid's bounds are 1e3 for speech, else 1e4.
WAGNER: dict[str, list[tuple[str, tuple[float, ...], tuple[float, ...]]]] = {
    "WER": [
        ("small.en, LibriSpeech clean", (0.08, 0.08, 0.09), (11.7, 71.9, 11.7, 27.0, 5.8, 49.5)),
        ("small.en, LibriSpeech other", (0.14, 0.14, 0.15), (10.7, 74.6, 11.1, 22.7, 7.1, 54.5)),
        ("small.en, TED-LIUM", (0.22, 0.22, 0.24), (12.5, 78.9, 11.9, 25.1, 8.7, 58.7)),
        ("small.en, CommonVoice 16", (0.22, 0.22, 0.27), (10.4, 66.8, 10.4, 19.8, 8.1, 51.8)),
        ("large-v2, LibriSpeech clean", (0.07, 0.07, 0.15), (10.8, 83.9, 10.8, 18.4, 7.4, 65.3)),
        ("large-v2, LibriSpeech other", (0.12, 0.12, 0.19), (11.4, 84.0, 11.2, 19.1, 7.0, 66.2)),
        ("large-v2, TED-LIUM", (0.20, 0.20, 0.23), (11.4, 83.3, 11.2, 17.2, 6.6, 66.3)),
        ("large-v2, CommonVoice 16", (0.25, 0.25, 0.31), (8.7, 78.5, 10.4, 17.2, 5.4, 61.3)),
    ],
    "ROUGE-1": [
        ("Llama 2-7B, CNN/DM", (0.30, 0.30, 0.26), (5.7, 78.0, 5.7, 67.8, 4.2, 18.2)),
        ("Llama 2-13B, CNN/DM", (0.31, 0.31, 0.29), (10.1, 37.2, 10.1, 18.3, 2.6, 23.5)),
        ("Qwen 7B, CNN/DM", (0.31, 0.31, 0.26), (6.8, 92.4, 6.8, 72.2, 1.6, 39.8)),
        ("Gemma 7B, CNN/DM", (0.23, 0.23, 0.17), (10.6, 68.4, 10.6, 33.1, 3.0, 24.2)),
    ],
}
