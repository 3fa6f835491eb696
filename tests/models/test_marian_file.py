"""Marian's binary files: a tiny translator written in its layout, read, converted and driven."""

import struct

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import outrider
from outrider import ReferenceLookup, SamplingParams, Stop
from outrider.errors import ConfigurationError
from outrider.models.seq2seq import marian_file

WIDE, DEEP, VOCAB = 16, 24, 40
SETTINGS = {
    **marian_file._EXPECTED,
    "dim-emb": str(WIDE),
    "enc-depth": "1",
    "dec-depth": "2",
    "transformer-heads": "2",
    "transformer-dim-ffn": str(DEEP),
}


def items(seed=0):
    """Weights of a tiny model by Marian's names, matrices as it multiplies with them: [in, out]."""
    random = torch.Generator().manual_seed(seed)

    def some(*shape):
        return torch.randn(*shape, generator=random) * 0.4

    made = {"Wemb": some(VOCAB, WIDE) * 2, "decoder_ff_logit_out_b": some(1, VOCAB)}
    for side, layers, own in (("encoder", 1, "self"), ("decoder", 2, "rnn")):
        for number in range(1, layers + 1):
            start = f"{side}_l{number}_"
            for part in ("self", "context")[own == "rnn" :][:1]:
                for name in "qkvo":
                    made[f"{start}{part}_W{name}"] = some(WIDE, WIDE)
                    made[f"{start}{part}_b{name}"] = some(1, WIDE)
            if own == "rnn":
                made |= {f"{start}rnn_W": some(WIDE, WIDE), f"{start}rnn_Wf": some(WIDE, WIDE)}
                made[f"{start}rnn_bf"] = some(1, WIDE)
            made |= {f"{start}ffn_W1": some(WIDE, DEEP), f"{start}ffn_W2": some(DEEP, WIDE)}
            made |= {f"{start}ffn_b1": some(1, DEEP), f"{start}ffn_b2": some(1, WIDE)}
            norms = (
                ["ffn_ffn", "self_Wo"] if own == "self" else ["ffn_ffn", "rnn_ffn", "context_Wo"]
            )
            for norm in norms:
                made[f"{start}{norm}_ln_scale"] = 1 + some(1, WIDE)
                made[f"{start}{norm}_ln_bias"] = some(1, WIDE)
    return made


def in_bytes(whole, scale):
    """Integers, transposed unless they are embeddings, and the scale behind them."""
    return whole.to(torch.int8).contiguous().numpy().tobytes() + struct.pack("<f", scale)


def write(path, made, settings, eight_bits=()):
    """A file in Marian's layout; matrices named in `eight_bits` are stored as integers."""
    stored = []
    for name, tensor in made.items():
        if name in eight_bits:
            scale = 127 / float(tensor.abs().max())
            whole = (tensor * scale).round()
            whole = whole if name == "Wemb" else whole.T
            stored.append((name, 0x4101, tuple(tensor.shape), in_bytes(whole, scale)))
            stored.append((f"{name}_QuantMultA", 0x404, (1, 1), struct.pack("<f", 3.0)))
        else:
            stored.append((name, 0x404, tuple(tensor.shape), tensor.contiguous().numpy().tobytes()))
    text = "".join(f"{name}: {value}\n" for name, value in settings.items()).encode() + b"\0"
    stored.append(("special:model.yml", 0x101, (len(text),), text))
    head = struct.pack("<QQ", 1, len(stored))
    for name, kind, shape, data in stored:
        head += struct.pack("<QQQQ", len(name) + 1, kind, len(shape), len(data))
    head += b"".join(name.encode() + b"\0" for name, *_ in stored)
    head += b"".join(struct.pack(f"<{len(shape)}i", *shape) for _, _, shape, _ in stored)
    gap = -(len(head) + 8) % 256
    head += struct.pack("<Q", gap) + bytes(gap)
    path.write_bytes(head + b"".join(data for *_, data in stored))
    return path


def expected(made, source, text):
    """Logits of a text by Marian's formulas, written out: encoder, cells, cross attention."""

    def affine(x, name, bias):
        return x @ made[name] + made[bias]

    def norm(x, name):
        scale, bias = made[f"{name}_ln_scale"][0], made[f"{name}_ln_bias"][0]
        return torch.nn.functional.layer_norm(x, (WIDE,), scale, bias, 1e-9)

    def attend(x, y, name):
        q, k, v = (
            affine(t, f"{name}_W{c}", f"{name}_b{c}") for t, c in ((x, "q"), (y, "k"), (y, "v"))
        )
        q, k, v = (t.view(len(t), 2, -1).transpose(0, 1) for t in (q, k, v))
        out = (q @ k.mT / (WIDE // 2) ** 0.5).softmax(-1) @ v
        return affine(out.transpose(0, 1).flatten(1), f"{name}_Wo", f"{name}_bo")

    def fed(x, name):
        inner = torch.relu(affine(x, f"{name}_ffn_W1", f"{name}_ffn_b1"))
        return norm(x + affine(inner, f"{name}_ffn_W2", f"{name}_ffn_b2"), f"{name}_ffn_ffn")

    def placed(x):
        rate = torch.exp(
            -torch.log(torch.tensor(10000.0)) * torch.arange(WIDE // 2) / (WIDE // 2 - 1)
        )
        angles = torch.arange(len(x))[:, None] * rate
        return x * WIDE**0.5 + torch.cat([angles.sin(), angles.cos()], 1)

    seen = placed(made["Wemb"][torch.tensor(source)])
    seen = norm(seen + attend(seen, seen, "encoder_l1_self"), "encoder_l1_self_Wo")
    seen = fed(seen, "encoder_l1")
    x = placed(torch.cat([torch.zeros(1, WIDE), made["Wemb"][torch.tensor(text)]]))
    for name in ("decoder_l1", "decoder_l2"):
        forget = torch.sigmoid(affine(x, f"{name}_rnn_Wf", f"{name}_rnn_bf"))
        added, state, states = (1 - forget) * (x @ made[f"{name}_rnn_W"]), torch.zeros(WIDE), []
        for keep, new in zip(forget, added, strict=True):
            state = keep * state + new
            states.append(torch.relu(state))
        x = norm(x + torch.stack(states), f"{name}_rnn_ffn")
        x = norm(x + attend(x, seen, f"{name}_context"), f"{name}_context_Wo")
        x = fed(x, name)
    return x @ made["Wemb"].T + made["decoder_ff_logit_out_b"]


SOURCE, TEXT = [5, 9, 12, 7, 0], [3, 8, 8, 20]


@torch.inference_mode()
def test_logits_are_those_of_marians_formulas(tmp_path):
    made = items()
    model = marian_file.model_of(write(tmp_path / "model.bin", made, SETTINGS))
    text = torch.tensor([[VOCAB, *TEXT]])
    logits = model(input_ids=torch.tensor([SOURCE]), decoder_input_ids=text).logits[0]
    wanted = expected(made, SOURCE, TEXT)
    assert torch.allclose(logits[:, 2:VOCAB], wanted[:, 2:], atol=1e-4)
    assert torch.allclose(logits[:, 0], wanted[:, 0], atol=1e-4)
    assert bool((logits[:, [1, VOCAB]] < -9000).all())  # what no text may hold


def test_eight_bits_are_read_as_they_were_cut(tmp_path):
    made = items()
    some = ("Wemb", "decoder_l1_rnn_W", "encoder_l1_ffn_W1")
    read, settings = marian_file.read_items(write(tmp_path / "m.bin", made, SETTINGS, some))
    assert settings["dec-cell"] == "ssru"
    assert read.keys() == made.keys()
    for name, tensor in made.items():
        step = float(tensor.abs().max()) / 127 if name in some else 0.0
        assert float((read[name] - tensor).abs().max()) <= step / 2 + 1e-6


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    home = tmp_path_factory.mktemp("marian")
    write(home / "model.tiny.bin", items(), SETTINGS)
    words = {"</s>": 0, "<unk>": 1, **{f"w{n}": n for n in range(2, VOCAB)}}
    Tokenizer(WordLevel(words, "<unk>")).save(str(home / "tokenizer.json"))
    marian_file.convert(home, home / "into")
    return home / "into"


@pytest.fixture(scope="module")
def loaded(converted):
    return outrider.load(converted, dtype="float32", threads=1)


def test_a_converted_folder_translates_as_transformers_does(converted, loaded):
    from transformers import AutoModelForSeq2SeqLM

    theirs = AutoModelForSeq2SeqLM.from_pretrained(converted)
    plain = loaded.plain().generate([SOURCE, SOURCE[2:]], SamplingParams(0), Stop(30))
    for source, done in zip((SOURCE, SOURCE[2:]), plain.completions, strict=True):
        text = theirs.generate(torch.tensor([source]), max_new_tokens=30, do_sample=False)
        assert done.token_ids == text[0, 1:].tolist()
        assert len(done.token_ids) > 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_leave_texts_as_they_are(loaded, temperature):
    sources = [SOURCE, SOURCE[1:], [4, 4, 6, 0]]
    how = [SamplingParams(temperature, seed=row) for row in range(3)]
    plain = loaded.plain(shared_noise=True).generate(sources, how, Stop(40))
    for drafter in (ReferenceLookup(3), outrider.PromptLookup(3)):
        done = loaded.using(drafter).generate(sources, how, Stop(40))
        assert [x.token_ids for x in done.completions] == [x.token_ids for x in plain.completions]


def test_a_translator_is_a_draft_model_too(loaded):
    """Its own states grow along its guesses, as trees; what it drafts for itself is taken."""
    how = [SamplingParams(t, seed=row) for row, t in enumerate((0.0, 0.8))]
    sources = [SOURCE, SOURCE[1:]]
    plain = loaded.plain(shared_noise=True).generate(sources, how, Stop(40))
    drafter = outrider.DraftModel(loaded.engine.target, (2, 2, 1), shared_noise=True)
    done = loaded.using(drafter, "match").generate(sources, how, Stop(40))
    assert [x.token_ids for x in done.completions] == [x.token_ids for x in plain.completions]
    assert done.stats.mean_acceptance_length > 2


def test_other_files_are_refused_with_what_was_found(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ConfigurationError, match=r"version .* items\b.*give the \*\.bin file"):
        marian_file.read_items(path)
    whole = write(path, items(), SETTINGS).read_bytes()
    path.write_bytes(whole[:200])
    with pytest.raises(ConfigurationError, match="ends or differs"):
        marian_file.read_items(path)
    write(path, items(), SETTINGS | {"dec-cell": "gru"})
    with pytest.raises(ConfigurationError, match=r"has dec-cell: ssru; got .* with gru"):
        marian_file.model_of(path)
    for lost in ("Wemb", "decoder_l2_rnn_W"):
        write(path, {name: w for name, w in items().items() if name != lost}, SETTINGS)
        with pytest.raises(ConfigurationError, match=r"is missing or differs; download it again"):
            marian_file.model_of(path)
    write(path, items(), SETTINGS | {"transformer-dim-ffn": "32"})
    with pytest.raises(ConfigurationError, match="missing or differs"):
        marian_file.model_of(path)
    write(path, items(), SETTINGS | {"enc-depth": "2"})
    with pytest.raises(ConfigurationError, match=r"encoder\.layers\.1"):
        marian_file.model_of(path)
    with pytest.raises(ConfigurationError, match=r"one model\*\.bin and a tokenizer\.json"):
        marian_file.convert(tmp_path, tmp_path / "into")
