import ast
import sys
from pathlib import Path

import pytest

from continuous_attention import cli
from continuous_attention.experiments.report import UserError


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["experiment"], ["experiment", "--help"]])
def test_help_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: continuous-attention")
    assert "experiment language" in out
    assert err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.split()[0] == "continuous-attention"


@pytest.mark.parametrize(
    "arguments", [["train"], ["experiment", "nothing"], ["experiment", "nothing", "--help"], ["--x"]]
)
def test_an_unknown_command_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("continuous-attention: no command ")
    assert len(err.splitlines()) == 1


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.main(["experiment", "language", "--help"]) == 2
    assert capsys.readouterr().err == (
        "continuous-attention: 'experiment language' needs the extra: pip install 'continuous-attention[experiments]'\n"
    )


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (UserError("no such thing"), 2, "continuous-attention: no such thing\n"),
        (KeyboardInterrupt("stopped; go on with x"), 130, "continuous-attention: stopped; go on with x\n"),
        (KeyboardInterrupt(), 130, "continuous-attention: interrupted\n"),
    ],
)
def test_failures_of_a_command_become_one_line(
    raised: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: list[str]) -> None:
        raise raised

    monkeypatch.setattr(cli, "import_module", lambda name: type("Module", (), {"main": staticmethod(fail)}))
    assert cli.main(["experiment", "language"]) == code
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize("module", ["cli.py", "experiments/report.py"])
def test_imports_the_standard_library_only(module: str) -> None:
    tree = ast.parse((Path(cli.__file__).parent / module).read_text(encoding="utf-8"))
    imported = [
        name
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    ]
    foreign = {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
    assert foreign <= {"continuous_attention.experiments.report"}
