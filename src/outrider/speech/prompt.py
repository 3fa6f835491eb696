"""What the decoder's text begins with: earlier text, language, task, and whether times come."""

from collections.abc import Sequence

from outrider.speech.vocabulary import Vocabulary


def prompt(
    words: Vocabulary,
    language: str | None,
    task: str,
    timestamps: bool,
    previous: Sequence[int] = (),
    most_previous: int = 223,
) -> tuple[list[int], int]:
    """The prompt of a window, and the place of its start token.

        [<|startofprev|> previous text] <|startoftranscript|> [<|en|> <|transcribe|>]
        [<|notimestamps|>]

    `previous` loses its beginning beyond `most_previous` tokens. Models without <|startofprev|>
    are not told earlier text, English-only models neither language nor task.
    """
    ids: list[int] = []
    if previous and words.previous_id is not None:
        ids += [words.previous_id, *previous[-most_previous:]]
    start = len(ids)
    ids.append(words.start_id)
    if words.multilingual:
        assert language is not None, "a language is given or detected before"
        ids += [words.languages[language], words.tasks[task]]
    if not timestamps:
        ids.append(words.no_timestamps_id)
    return ids, start
