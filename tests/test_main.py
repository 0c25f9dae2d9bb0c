"""`python -m pallas_fa2` compiles one program, and says whether it agrees with the definition."""

import logging
from typing import Any

import jax
import pytest

from pallas_fa2 import __main__ as command
from pallas_fa2.backends import dense


def test_the_command_compiles_what_it_checks_and_nothing_else(
    capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        assert command.main() == 0
    compiled = [x for x in caplog.messages if x.startswith("Finished XLA compilation")]
    assert len(compiled) == 1 and "jit(run)" in compiled[0]
    printed = capsys.readouterr().out
    assert "implementation  blockwise on cpu" in printed and "agrees with the definition" in printed


def test_a_wrong_gradient_is_an_exit_code(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    define = dense.attention

    def another_dk(*args: Any) -> dict:
        results = define(*args)
        return results | {"dk": 1.001 * results["dk"]}

    monkeypatch.setattr(dense, "attention", another_dk)
    assert command.main() == 1
    assert "DOES NOT AGREE WITH THE DEFINITION" in capsys.readouterr().out


def test_help_is_help(capsys: pytest.CaptureFixture) -> None:
    for arguments in (["--help"], ["-h"]):
        with pytest.raises(SystemExit) as exit_:
            command.run(arguments)
        assert exit_.value.code == 0 and "python -m pallas_fa2 cache" in capsys.readouterr().out


def test_an_argument_that_is_not_known_is_an_error(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_:
        command.run(["cash"])
    assert exit_.value.code == 2 and "unrecognized arguments: cash" in capsys.readouterr().err
