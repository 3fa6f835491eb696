"""A file of tensors is whole or not there, for everybody, and a full disk is an OSError."""

import resource
import stat

import pytest
import torch
from safetensors.torch import load_file

from outrider.models import tensor_file


def test_others_may_read_it_as_they_may_other_files(tmp_path):
    tensor_file.write({"a": torch.arange(3)}, tmp_path / "made.safetensors", {"of": "a test"})
    (tmp_path / "other").write_text("")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in sorted(tmp_path.iterdir())]
    assert modes[0] == modes[1]
    assert load_file(tmp_path / "made.safetensors")["a"].tolist() == [0, 1, 2]


def test_a_full_disk_leaves_what_was_there(tmp_path):
    path = tmp_path / "made.safetensors"
    tensor_file.write({"a": torch.zeros(3)}, path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # as a disk that is full then
    try:
        with pytest.raises(OSError, match="large"):
            tensor_file.write({"a": torch.zeros(9000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert load_file(path)["a"].shape == (3,)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
