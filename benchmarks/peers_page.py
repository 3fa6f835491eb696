"""The page beside other engines, whole: models, every section of it, pictures.

    python benchmarks/peers_page.py get            # `make models`: what is not in models/ yet
    python benchmarks/peers_page.py measure        # `make peers`: hours, for docs/results/peers.md
    python benchmarks/peers_page.py measure --quick --only q8 whisper

Each section is a command of its own, most of them `outrider bench peers`, which stands on the page
with the processor's name. A section that is there is not measured again (--again NAME measures it
once more); one whose model or package is missing is left out with the sentence that gets it, one
that fails is named, and the others go on. Sections that are capped run as on a processor with AVX2
alone, and only on x86-64. A folder of models that is there is used as it is, whatever filled it.
"""

import argparse
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider_lab.peers import gguf_files, page
from outrider_lab.peers.engines import CAPS

HERE = Path(__file__).parent
CAPPED = dict(zip(CAPS, ("avx2", "AVX2", "avx2", "AVX2"), strict=True))
SOUNDS = "https://www.openslr.org/resources/31/dev-clean-2.tar.gz"  #: of LibriSpeech, CC BY 4.0


def _hub(repository: str, *files: str) -> list[str]:
    return ["hf", "download", repository, *files, "--local-dir", "{}"]


def _coder(size: str) -> list[str]:
    name = f"Qwen2.5-Coder-{size}-Instruct-GGUF"
    return _hub(f"Qwen/{name}", f"qwen2.5-coder-{size.lower()}-instruct-q4_k_m.gguf")


#: What the page is measured on: a folder, and the command that fills it ({} is its path).
MODELS = {
    "smollm2": _hub("HuggingFaceTB/SmolLM2-135M-Instruct"),
    "qwen2.5-coder-0.5b": _coder("0.5B"),
    "qwen2.5-coder-1.5b": _coder("1.5B"),
    "whisper-base": _hub("openai/whisper-base"),
    "whisper-base-ct2": _hub("Systran/faster-whisper-base"),
    "recordings": ["sh", "-c", f"mkdir -p {{}} && curl -L {SOUNDS} | tar xz -C {{}}"],
    "annalog": ["pip", "download", "--no-deps", "--dest", "{}", "annalog"],
}


@dataclass(frozen=True)
class Section:
    """One part of the page.

    words   of the command; a name of MODELS in braces is its folder, with .gguf behind it its file,
            with .Q8_0 the file that is written of it
    script  in benchmarks/ that writes the section's tables; "": `outrider bench peers` does
    quick   words for a trial in place of `--quick`, of a script
    module  that this Python needs besides
    """

    title: str
    words: str
    capped: bool = False
    script: str = ""
    quick: str = ""
    module: str = ""

    def models(self) -> list[str]:
        """Names of what it reads."""
        return [name for name in MODELS if f"{{{name}}}" in self.words]


_LLAMA = "--engines llama.cpp"
_ONE = "--no-first-start --cores 0"
_TWO = "--cores 0,1"
_TRANSLATED = "beside_ctranslate2.py"
SECTIONS = {
    "q8-capped": Section(
        "SmolLM2 Q8_0, capped",
        f"-m {{smollm2}} --weights Q8_0 --modes NGRAM_SIMPLE,NGRAM_MOD {_LLAMA} {_ONE}",
        capped=True,
    ),
    "q8": Section(
        "SmolLM2 Q8_0",
        "-m {smollm2} --weights Q8_0 --modes NGRAM_SIMPLE --engines 'llama.cpp,OpenVINO GenAI' "
        f"{_ONE}",
    ),
    "q8-two-capped": Section(
        "SmolLM2 Q8_0, two cores, capped",
        f"-m {{smollm2}} --weights Q8_0 --modes NGRAM_SIMPLE {_LLAMA} --no-first-start {_TWO}",
        capped=True,
    ),
    "q4-capped": Section(
        "SmolLM2 Q4_1, capped",
        f"-m {{smollm2}} --weights Q4_1 --modes NGRAM_SIMPLE {_LLAMA} {_ONE}",
        capped=True,
    ),
    "bf16-capped": Section(
        "SmolLM2 in bfloat16, capped",
        f"-m {{smollm2}} --weights BF16 --modes NGRAM_SIMPLE {_LLAMA} {_ONE}",
        capped=True,
    ),
    "coder-0.5b-capped": Section(
        "Qwen2.5-Coder 0.5B, capped",
        f"-m {{qwen2.5-coder-0.5b}}.gguf --limit 1 -n 48 --modes NGRAM_SIMPLE {_LLAMA} {_ONE}",
        capped=True,
    ),
    "coder-1.5b-capped": Section(
        "Qwen2.5-Coder 1.5B, its 0.5B among the drafts, capped",
        "-m {qwen2.5-coder-1.5b}.gguf --draft-model {qwen2.5-coder-0.5b}.gguf --limit 1 -n 64 "
        f"--modes NGRAM_SIMPLE {_LLAMA} {_ONE} --rounds 2",
        capped=True,
    ),
    "coder-1.5b": Section(
        "Qwen2.5-Coder 1.5B",
        f"-m {{qwen2.5-coder-1.5b}}.gguf --limit 1 -n 64 --modes '' {_LLAMA} {_ONE}",
    ),
    "whisper-capped": Section(
        "Whisper base, capped",
        "--whisper {whisper-base} --converted {whisper-base-ct2} --recordings {recordings} "
        "--count 10 --engines faster-whisper",
        capped=True,
    ),
    "servers-q8": Section(
        "SmolLM2 Q8_0, servers",
        "-m {smollm2} --weights Q8_0 --clients 1,4,8,16 --limit 3 -n 48 --rounds 2 "
        f"--modes NGRAM_SIMPLE --engines llama.cpp,vLLM {_TWO}",
    ),
    "servers-q8-capped": Section(
        "SmolLM2 Q8_0, servers, capped",
        "-m {smollm2} --weights Q8_0 --clients 8,16 --limit 4 -n 48 --rounds 2 "
        f"--modes NGRAM_SIMPLE {_LLAMA} {_TWO}",
        capped=True,
    ),
    "servers-bf16": Section(
        "SmolLM2 in bfloat16, servers",
        f"-m {{smollm2}} --weights BF16 --clients 8,16 --limit 4 -n 48 --engines vLLM {_TWO}",
    ),
    "rows-capped": Section(
        "16 rows that come and go, in one process, capped",
        "{smollm2}.Q8_0 --rows 16 --rounds 3 --threads 2 --seconds 20",
        capped=True,
        script="continuous_batching.py",
        quick="--each 1 --tokens 8 --rounds 1",
    ),
    "growth": Section(
        "What a step costs by length: Qwen2.5-Coder 0.5B, one row",
        "{qwen2.5-coder-0.5b}.gguf --rows 1 --lengths 1024 4096 16384 32768 --arms copies recall "
        "--steps 6 --blocks 4",
        script="growth.py",
        quick="--lengths 256 512 --steps 2 --blocks 1",
    ),
    "growth-rows": Section(
        "What a step costs by length: Qwen2.5-Coder 0.5B, 4 and 16 rows",
        "{qwen2.5-coder-0.5b}.gguf --rows 4 16 --lengths 1024 4096 16384 --arms copies "
        "--steps 4 --blocks 3 --slots 70000",
        script="growth.py",
        quick="--rows 2 --lengths 64 128 --steps 2 --blocks 1",
    ),
    "annalog": Section(
        "ANNalog (a Marian kind, 4 million parameters), beside CTranslate2",
        "--wheels {annalog} --rounds 5",
        script=_TRANSLATED,
        quick="--rounds 1",
        module="ctranslate2",
    ),
    "annalog-capped": Section(
        "ANNalog beside CTranslate2, capped",
        "--wheels {annalog} --rounds 5",
        capped=True,
        script=_TRANSLATED,
        quick="--rounds 1",
        module="ctranslate2",
    ),
    "translator": Section(
        "A translator's shape (opus-mt, random weights), beside CTranslate2",
        "--random --texts 2 --rounds 2",
        script=_TRANSLATED,
        quick="--texts 1 --rounds 1",
        module="ctranslate2",
    ),
    "translator-capped": Section(
        "A translator's shape beside CTranslate2, capped",
        "--random --texts 2 --rounds 2",
        capped=True,
        script=_TRANSLATED,
        quick="--texts 1 --rounds 1",
        module="ctranslate2",
    ),
}  # fmt: skip


def get(models: Path) -> int:
    """Fill the folders that are not there; how many could not be."""
    failed = 0
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    for name, command in MODELS.items():
        folder = models / name
        if _there(folder):
            print(f"{name}: there")
            continue
        part = folder.with_name(f"{name}.part")  # what was cut off is not taken for a model
        words = [word.replace("{}", shlex.quote(str(part))) for word in command]
        print(f"{name}: {_shown(words)}", flush=True)
        try:
            done = subprocess.run(words, env=os.environ | {"PATH": tools}).returncode
        except OSError as error:
            print(f"{name}: {error}", file=sys.stderr)
            done = 1
        if done == 0 and _there(part):
            part.rename(folder)
        else:
            failed += 1
    return failed


def _there(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _shown(words: Sequence[str]) -> str:
    """A command as one types it."""
    return shlex.join(words[-1:] if words[0] == "sh" else words).strip("'")


def missing(section: Section, models: Path) -> str | None:
    """Why a section cannot be measured here, and what would help; None: it can."""
    if section.capped and platform.machine() not in ("x86_64", "AMD64"):
        return f"{platform.machine()} has no such cap"
    for name in section.models():
        if not _there(models / name):
            return f"no {models / name}; python benchmarks/peers_page.py get"
    if section.module and importlib.util.find_spec(section.module) is None:
        return f"no {section.module}; {sys.executable} -m pip install {section.module}"
    return None


def words_of(section: Section, asked: argparse.Namespace) -> list[str]:
    """Of its command, paths in place of names."""
    found = []
    for word in shlex.split(section.words):
        name = next((one for one in section.models() if word.startswith(f"{{{one}}}")), None)
        if name is not None:
            folder = asked.models / name
            kind = word.removeprefix(f"{{{name}}}").removeprefix(".")
            if kind == "gguf":
                folder = next(iter(sorted(folder.glob("*.gguf"))), folder)
            elif kind:
                (asked.out / "gguf").mkdir(parents=True, exist_ok=True)
                folder = gguf_files.written(folder, asked.out / "gguf", kind)
            word = str(folder)
        found.append(word)
    return [*found, *shlex.split((section.quick or "--quick") if asked.quick else "")]


def measured(name: str, section: Section, asked: argparse.Namespace) -> str:
    """Run a section's command; the name of the file that has it. Raises CalledProcessError."""
    out: Path = asked.out
    words = words_of(section, asked)
    caps = CAPPED if section.capped else {}
    environment = {k: v for k, v in os.environ.items() if k not in CAPS} | caps
    if section.script:
        return _scripted(name, section, words, environment, out)
    before = _stamps(out)
    peer = ["--peer", asked.peer] if asked.peer else []
    command = [sys.executable, "-m", "outrider", "bench", "peers", *peer, "--out", str(out)]
    subprocess.run([*command, *words], env=environment, check=True)
    after = _stamps(out)
    return next(one for one in after if before.get(one) != after[one])


def _stamps(out: Path) -> dict[str, int]:
    """When each section's file was written."""
    return {
        path.stem.removeprefix("section-"): path.stat().st_mtime_ns
        for path in out.glob("section-*.json")
    }


def _scripted(
    name: str, section: Section, words: list[str], environment: Mapping[str, str], out: Path
) -> str:
    """A section of the JSON that a script writes: `about` it, and its `tables`."""
    where = out / name
    where.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    script = HERE / section.script
    command = [sys.executable, str(script), *words, "--out", str(where)]
    subprocess.run(command, env=environment, check=True)
    (told_in,) = where.glob("*.json")
    told: dict[str, Any] = json.loads(told_in.read_text("utf-8"))
    caps = " ".join(f"{key}={value}" for key, value in CAPPED.items() if section.capped)
    found = page.section(
        section.title, told["tables"], {}, {}, told["about"], (load, os.getloadavg()[0])
    )
    shown = shlex.join(["python", f"benchmarks/{section.script}", *words, "--out", str(where)])
    found |= {"caps": caps, "command": shown}
    for picture in where.glob("*.svg"):
        found["picture"] = f"peers-{name}.svg"
        shutil.copy(picture, out / found["picture"])
    page.keep(out, name, found)
    return name


def measure(asked: argparse.Namespace) -> int:
    """Every section that is asked for and not there yet, then the page; how many failed."""
    asked.out.mkdir(parents=True, exist_ok=True)
    ledger = asked.out / "sections.json"
    there: dict[str, str] = json.loads(ledger.read_text("utf-8")) if ledger.exists() else {}
    left, failed = {}, 0
    for name, section in SECTIONS.items():
        if asked.only and name not in asked.only:
            continue
        if name in there and name not in asked.again:
            print(f"{name}: there", flush=True)
            continue
        why = missing(section, asked.models)
        if why is not None:
            left[section.title] = why
            print(f"{name}: left out: {why}", flush=True)
            continue
        print(f"{name}: {section.title}", flush=True)
        try:
            there[name] = measured(name, section, asked)
        except subprocess.CalledProcessError as error:
            failed += 1
            left[section.title] = f"its command ended with status {error.returncode}"
            print(f"{name}: {left[section.title]}", file=sys.stderr, flush=True)
            continue
        ledger.write_text(json.dumps(there, indent=1) + "\n", encoding="utf-8")
    order = [there[name] for name in SECTIONS if name in there]
    page.write(asked.out, asked.out / "peers.md", True, order, left)
    print(f"written to {asked.out / 'peers.md'}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("get", "measure"))
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--peer", help="a Python that has the other engines. Default: this one")
    parser.add_argument("--out", type=Path, default=Path("bench-out/peers"))
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[], metavar="NAME")
    parser.add_argument("--again", nargs="+", choices=SECTIONS, default=[], metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="a trial of a few minutes")
    asked = parser.parse_args()
    failed = get(asked.models) if asked.what == "get" else measure(asked)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
