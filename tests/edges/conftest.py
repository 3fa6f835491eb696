"""The command line in this process."""

import sys

import pytest

from outrider import cli


@pytest.fixture
def outrider(monkeypatch, capsys):
    """Runs a command in this process: (exit code, stdout, stderr)."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["outrider", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as leave:
            code = int(leave.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call
