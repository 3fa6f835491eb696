"""The draft for Whisper, rehearsed with a tiny random one: recorded, trained, saved, measured."""

import random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from training.whisper_attention import headwise
from training.whisper_record import read_out, three
from training.whisper_speech import RATE, Said, Window, spoil
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

from training import (
    whisper_alpha,
    whisper_draft,
    whisper_head,
    whisper_laws,
    whisper_model,
    whisper_record,
)

END, START, TRANSCRIBE, EARLIER, PLAIN, VOCABULARY = 100, 101, 105, 107, 108, 124
LANGUAGES = {"<|en|>": 102, "<|fr|>": 103}


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=3, num_mel_bins=8,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, init_std=0.2,
        decoder_ffn_dim=64, max_source_positions=12, max_target_positions=40, pad_token_id=END,
        bos_token_id=END, eos_token_id=END, decoder_start_token_id=START,
        suppress_tokens=None, begin_suppress_tokens=None, attn_implementation="eager",
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    model.generation_config = GenerationConfig(
        eos_token_id=END, decoder_start_token_id=START, lang_to_id=LANGUAGES,
        task_to_id={"transcribe": TRANSCRIBE}, no_timestamps_token_id=PLAIN,
        prev_sot_token_id=EARLIER, suppress_tokens=[1, 2, PLAIN], begin_suppress_tokens=[3, END],
        max_initial_timestamp_index=5,
    )  # fmt: skip
    return model


@pytest.fixture(scope="module")
def shards(target, tmp_path_factory):
    """Two shards of three windows, the second with earlier text in some prompts."""
    folder = tmp_path_factory.mktemp("spoken")
    for seed in range(2):
        recorder, dice = whisper_laws.Target(target, seed), random.Random(seed)
        rows = [three(recorder, name, folder, dice) for name in ("en", "fr", "en")]
        torch.manual_seed(seed)
        features = torch.randn(3, 8, 24)
        whisper_laws.record(recorder, features, rows, folder / f"{seed}.safetensors", most=12)
    return folder


def windows(shards):
    return [window for shard in sorted(shards.iterdir()) for window in whisper_laws.windows(shard)]


def all_ids():
    return torch.arange(VOCABULARY)


def test_recorded_laws_are_the_targets(target, shards):
    """Suppressed ids have no share, the rest sums to one, and greedy text is the likeliest."""
    head = target.get_output_embeddings().weight.detach()
    greedy = 0
    for window in windows(shards):
        law = ((window.hidden_ND.float() @ head.T) - window.total_N[:, None]).exp()
        law[:, target.generation_config.suppress_tokens] = 0
        assert law.sum(-1) == pytest.approx(1, abs=0.02)
        first = window.row_N == 0  # greedy, without timestamps
        text = window.tokens_N[first]
        law[:, PLAIN:] = 0
        counted = window.counted_N[first].nonzero()[1:, 0]  # the first has a rule of its own
        assert (law[first][counted].argmax(-1) == text[counted + 1]).all()
        greedy += len(counted)
    assert greedy > 20


def test_a_text_is_followed_with_the_times_at_which_it_was_said(target, tmp_path, monkeypatch):
    """Laws along a given text are those of the text fed token by token, after either prompt."""
    monkeypatch.setattr(whisper_record, "LONGEST_JOIN", 0.05)
    said = [Said("ab", 0.0, 0.04), Said("c.", 0.06, 0.1), Said("d", 0.2, 0.24)]
    window = Window(torch.zeros(8).numpy(), "fr", said)

    def tokenizer(text, add_special_tokens):
        return SimpleNamespace(input_ids=[ord(letter) - 90 for letter in text if letter > "."])

    recorder = whisper_laws.Target(target)
    after, _ = read_out(recorder, window, tokenizer, ["e"], random.Random(1))
    assert after.tokens[: after.prompt] == [EARLIER, 11, START, 103, TRANSCRIBE, PLAIN]
    rows = read_out(recorder, window, tokenizer, ["e"], random.Random(2))
    plain, timed = rows
    assert plain.tokens[-6:] == [PLAIN, 7, 8, 9, 10, END]
    assert plain.tokens[: plain.prompt] == [START, 103, TRANSCRIBE, PLAIN]
    first = PLAIN + 1
    ends = [first, 7, 8, first + 2, first + 2, 9, first + 5, first + 10, 10, first + 12, END]
    assert timed.tokens[timed.prompt :] == ends
    torch.manual_seed(3)
    features = torch.randn(2, 8, 24)
    rows = [rows, [whisper_laws.Row(recorder.prompt("en", False), False, 0.0)]]
    whisper_laws.record(recorder, features, rows, tmp_path / "0.safetensors", most=6)
    window, made = whisper_laws.windows(tmp_path / "0.safetensors")
    assert len(made.row_N.unique()) == 1
    with torch.no_grad():
        alone = target.model.decoder(
            input_ids=torch.tensor([plain.tokens]),
            encoder_hidden_states=recorder.encode(features)[:1],
        ).last_hidden_state[0]
    mine = window.row_N == 0
    assert window.tokens_N[mine].tolist() == plain.tokens
    assert (window.hidden_ND[mine].float() - alone).abs().max() < 0.01
    assert (window.hidden_ND[: len(alone) + 1].float()[1:] - alone).abs().max() > 0.5


def test_attention_head_by_head_is_the_eager_one():
    torch.manual_seed(0)
    for queries in (3, 40):  # all heads at once, one at a time
        query, key, value = (torch.randn(2, 4, n, 8) for n in (queries, 50, 50))
        mask = torch.zeros(1, 1, queries, 50).masked_fill(torch.rand(queries, 50) < 0.3, -1e9)
        scores = query @ key.mT + mask
        wanted = (scores.softmax(-1) @ value).transpose(1, 2)
        found, _ = headwise(None, query, key, value, mask)
        torch.testing.assert_close(found, wanted)
        assert not torch.allclose(headwise(None, query, key, value, None)[0], wanted)


def test_packed_transcripts_do_not_see_each_other(target, shards):
    """All layers of the target, packed, give the states that were recorded one row at a time."""
    whole = whisper_model.Draft(target, [0, 1, 2], all_ids()).eval()
    assert max(len(w.row_N.unique()) for w in windows(shards)) == 3
    for window in windows(shards):
        with torch.no_grad():
            states = whole(window.tokens_N, window.position_N, window.row_N, window.states_SD)
            wrong = whole(
                window.tokens_N, window.position_N, torch.zeros_like(window.row_N),
                window.states_SD,
            )  # fmt: skip
        assert (states - window.hidden_ND.float()).abs().max() < 0.1  # bf16 states of the encoder
        assert (wrong - window.hidden_ND.float()).abs().max() > 0.5


def test_the_head_holds_end_and_times_and_then_the_first_given():
    settings = SimpleNamespace(eos_token_id=END, no_timestamps_token_id=PLAIN, suppress_tokens=[2])
    ids = whisper_head.choose([7, 2, 5, START, 5, 9, 11], settings, VOCABULARY, 15 + 1 + 3)
    assert ids.tolist() == [5, 7, 9, END, *range(PLAIN + 1, VOCABULARY)]


def run(target, shards, out, tmp_path, monkeypatch, steps, more=""):
    """The program itself, on the tiny model's folder."""
    target.save_pretrained(tmp_path / "model")
    save_file({"ids": all_ids()}, tmp_path / "ids.safetensors")
    command = (
        f"x --model {tmp_path / 'model'} --data {shards} --ids {tmp_path / 'ids.safetensors'} "
        f"--out {out} --layers 0,2 --batch 2 --steps {steps} --of tiny/whisper {more}"
    )
    monkeypatch.setattr("sys.argv", command.split())
    whisper_draft.main()


def alphas(target, draft, shards):
    figures = whisper_alpha.Figures([], [])
    head = target.get_output_embeddings().weight.detach()
    for window in windows(shards):
        for row in (0, 1):
            part = whisper_alpha.only(window, row)
            whisper_alpha.measure(draft, head, target.generation_config, part, figures)
    positions = sum(map(len, figures.agrees))
    return sum(map(sum, figures.agrees)) / positions, sum(figures.alpha_1) / positions


def test_training_raises_alpha_and_goes_on_where_it_stopped(
    target, shards, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "draft"
    untrained = whisper_model.Draft(target, [0, 2], all_ids()).eval()
    run(target, shards, out, tmp_path, monkeypatch, 40)
    first = torch.load(out / "last.pt")
    run(target, shards, out, tmp_path, monkeypatch, 60)
    second = torch.load(out / "last.pt")
    assert (first["step"], second["step"]) == (40, 60)
    assert 0 < first["seconds"] < second["seconds"]
    run(target, shards, out, tmp_path, monkeypatch, 60)  # nothing is left to do
    assert "\n60 steps" in "\n" + capsys.readouterr().out.splitlines()[-1]
    trained = whisper_model.load(target, out).eval()
    before, after = alphas(target, untrained, shards), alphas(target, trained, shards)
    assert after[0] > before[0] + 0.1
    assert after[1] > before[1] + 0.1
    run(target, shards, tmp_path / "on", tmp_path, monkeypatch, 1, f"--start {out}")
    on = whisper_model.load(target, tmp_path / "on").eval()
    assert alphas(target, on, shards)[0] > after[0] - 0.1


def test_the_target_agrees_with_itself_and_a_poor_head_does_not(target, shards):
    whole = whisper_model.Draft(target, [0, 1, 2], all_ids()).eval()
    at_0, at_1 = alphas(target, whole, shards)
    assert min(at_0, at_1) > 0.95  # bf16 states of the encoder part them a little
    poor = whisper_model.Draft(target, [0, 1, 2], torch.tensor([5, END, 110, 111])).eval()
    assert alphas(target, poor, shards)[0] < at_0 - 0.2


def test_a_saved_draft_is_small_and_named_as_in_transformers(target, tmp_path):
    draft = whisper_model.Draft(target, [0, 2], torch.tensor([4, 9, END]))
    with torch.no_grad():
        draft.decoder.layers[1].fc1.weight.add_(1)
    size = whisper_model.save(draft, "tiny/whisper", {"alpha": 0.5}, tmp_path)
    parts = load_file(tmp_path / "draft.safetensors")
    own = dict(target.model.decoder.named_parameters())
    assert {n for n in parts if n.startswith("layers.0.")} == {
        n for n in own if n.startswith("layers.0.")
    }
    assert parts["ids"].tolist() == [4, 9, END]
    assert parts["layer_norm.weight"].dtype == torch.bfloat16
    layers = sum(p.numel() for n, p in own.items() if n.startswith(("layers.0.", "layers.2.")))
    assert 2 * layers < size < 2 * layers + 12_000
    again = whisper_model.load(target, tmp_path)
    torch.testing.assert_close(
        again.decoder.layers[1].fc1.weight,
        target.model.decoder.layers[2].fc1.weight + 1,
        atol=0.01,
        rtol=0,
    )


def test_steps_of_a_chain():
    assert whisper_alpha.steps([True] * 7, 3) == 2
    assert whisper_alpha.steps([False] * 3, 3) == 3
    assert whisper_alpha.steps([True, True, False, True], 2) == 2


def test_spoiling_keeps_a_voice_within_bounds():
    times = torch.arange(2 * RATE).numpy() / RATE
    tone = (0.5 * torch.sin(torch.tensor(440 * 6.283 * times))).numpy().astype("float32")
    for seed in range(12):
        spoilt = spoil(tone, random.Random(seed))
        assert spoilt.dtype == "float32"
        assert 0.01 < spoilt.std() < abs(spoilt).max() <= 1
        assert 0.85 < len(spoilt) / len(tone) < 1.2
    assert (spoil(tone, random.Random(1)) == spoil(tone, random.Random(1))).all()
