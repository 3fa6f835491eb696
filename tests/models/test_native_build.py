"""A compiled library is made of what the process has read, whole, and called as declared."""

import ctypes
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from test_native import BF16, call_of, filled, random_nodes

from outrider.models import LlamaRunner, native
from outrider.models.native import build, cross, int8, tiles
from outrider.testing import models

WHOLE = (ctypes.c_int64,)
needs_cc = pytest.mark.skipif(not shutil.which("cc"), reason="needs cc")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a new process of a user without a cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build._found.cache_clear()
    yield monkeypatch
    build._found.cache_clear()


def small(answer):
    """Sources of a library whose function adds `answer`."""
    added = f'#include "lanes.h"\nint added(int64_t x) {{ return x + {answer}; }}\n'
    return dict.fromkeys(build.SOURCES, "") | {"lanes.h": "#include <stdint.h>\n", "int8.c": added}


@needs_cc
def test_what_a_process_has_read_is_compiled_whatever_lies_there_now(fresh, tmp_path):
    made = []
    for answer in (1, 2, 1):  # the files of the package are others all the while
        fresh.setattr(build, "TEXTS", small(answer))
        build._found.cache_clear()
        made.append(build.function("added", WHOLE)(40) - 40)
    assert made == [1, 2, 1]
    assert len([*tmp_path.rglob("*.so")]) == 2
    assert not [*tmp_path.rglob("*.tmp")]


def test_libraries_are_written_elsewhere_and_moved_whole(monkeypatch, tmp_path):
    path, written = tmp_path / "library.so", []

    def compile_(command, **_):
        made = Path(command[command.index("-o") + 1])
        if not written:
            written.append(made)
            build.compiled(path, small(2), ["cc"])  # another thread, or process, at the same time
        assert not made.exists()
        assert "lanes.h" in {one.name for one in made.parent.iterdir()}
        assert build.whole(path) or not path.exists()
        made.write_text("whole")
        written.append(made)

    monkeypatch.setattr(subprocess, "run", compile_)
    build.compiled(path, small(1), ["cc"])
    first, other, again = written
    assert first == again != other
    assert path.read_bytes().startswith(b"whole")
    assert build.whole(path)
    assert [*tmp_path.iterdir()] == [path]


def cut(library):
    library.write_bytes(library.read_bytes()[:5000])


def emptied(library):
    library.write_bytes(b"")


def overwritten(library):
    library.write_bytes(b"no ELF" + library.read_bytes()[6:])


def foreign(library):
    """Whole, but of another system."""
    library.write_bytes(text := b"made elsewhere")
    library.write_bytes(text + hashlib.sha256(text).digest())


@needs_cc
@pytest.mark.parametrize("damage", [cut, emptied, overwritten, foreign])
def test_a_damaged_library_is_built_anew(fresh, tmp_path, damage):
    fresh.setattr(build, "TEXTS", small(1))
    build.function("added", WHOLE)
    (library,) = tmp_path.rglob("*.so")
    damaged = library.with_name("damaged")
    damaged.write_bytes(library.read_bytes())  # this process has loaded the other
    library.unlink()
    damage(damaged)
    damaged.rename(library)
    build._found.cache_clear()
    assert build.function("added", WHOLE)(40) == 41
    assert build.whole(library)
    before = library.stat().st_mtime_ns
    build._found.cache_clear()
    assert build.function("added", WHOLE)(40) == 41
    assert library.stat().st_mtime_ns == before


@needs_cc
def test_what_is_wrong_with_a_library_is_said_as_it_is(fresh, tmp_path):
    fresh.setattr(build, "TEXTS", small(1))
    fresh.setattr(build, "Library", lambda *_: ctypes.CDLL(str(tmp_path / "none")))
    assert re.match(r"the library made by 'cc' cannot be loaded: .*none: cannot", build.unbuilt())
    (tmp_path / "file").write_text("")
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    build._found.cache_clear()
    assert re.match("no library could be made in '.*/file/outrider': ", build.unbuilt())


@needs_cc
def test_a_function_is_not_called_with_other_arguments(fresh):
    fresh.setattr(build, "TEXTS", small(1))
    with pytest.raises(TypeError, match=r"added takes \(c_long\), and would be given \(c_float\)"):
        build.function("added", (ctypes.c_float,))
    assert build.function("added", WHOLE)(1) == 2


def test_every_function_is_called_as_its_source_declares():
    for name, types in (
        ("outrider_cross", cross._CROSS),
        ("outrider_int8", int8._PRODUCT),
        ("outrider_tiles", tiles._PRODUCT),
    ):
        assert build.taken(name, build.TEXTS) == types
        assert build.taken(name, build.TEXTS) != types[1:]
    fields = re.search(r"typedef struct \{([^}]*)\} Sizes;", build.TEXTS["attend.h"])[1]
    fields = re.sub(r"/\*.*?\*/|int64_t|\s", "", fields).replace(";", ",").strip(",").split(",")
    assert [(name, ctypes.c_int64) for name in fields] == native._Sizes._fields_


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("CC", "no-such-compiler", "'no-such-compiler' is not there"),
        ("CC", "false", "'false' failed"),
        ("OUTRIDER_COMPILED", "0", "OUTRIDER_COMPILED is 0"),
    ],
)
def test_without_a_compiler_torchs_operators_run(fresh, tmp_path, name, value, why):
    fresh.setenv(name, value)
    runner = LlamaRunner(models.llama(head_dim=16).to(BF16), False)
    assert why in runner.means
    with pytest.raises(RuntimeError, match=why.split(" ")[-1]):
        build.library()
    assert not [*tmp_path.rglob("*.so"), *tmp_path.rglob("*.tmp")]


@pytest.mark.slow
def test_the_library_is_built_once_and_has_the_same_bits_on_plainer_processors(fresh, tmp_path):
    if not shutil.which("cc"):
        pytest.skip("needs cc")
    assert build.unbuilt() is None
    (library,) = tmp_path.rglob("*.so")
    written = library.stat().st_mtime_ns
    build._found.cache_clear()
    assert build.unbuilt() is None
    assert library.stat().st_mtime_ns == written

    def across(dtype):
        keys, values = torch.randn(2, 1, 3, 40, 20).to(dtype)
        laid = cross.laid_keys(keys), cross.laid_values(values)
        return cross.attend(torch.randn(1, 7, 3, 20).to(dtype), *laid, 40)

    def answers():
        torch.manual_seed(2)
        nodes = random_nodes(2, 5, True)
        qkv = torch.randn(2, 5, 8 * 64).to(BF16)
        cache, keys, _ = filled(2, 2, 64, 300)
        with torch.inference_mode():
            call, _ = call_of(4, 2, 64, nodes)
            _, normed = call.norm(qkv, qkv, torch.ones(512, dtype=BF16))
            own = call.attend(qkv, cache.layers[0]), keys, normed, call.gate(qkv)
            return *own, across(BF16), across(torch.float32)

    tuned = answers()
    fresh.setenv("OUTRIDER_ISA", "avx2")  # without vectors of sixteen
    build._found.cache_clear()
    assert build.unbuilt() is None
    assert len([*tmp_path.rglob("*.so")]) == 2
    assert all(torch.equal(a, b) for a, b in zip(tuned, answers(), strict=True))
