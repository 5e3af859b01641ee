"""Which variants of the CPU kernels there are, and the choice among them."""

import importlib.util
from pathlib import Path

import pytest
import torch

from continuous_attention import continuous_attention, info
from continuous_attention.kernels import cpu

needs_kernels = pytest.mark.skipif(cpu.module is None, reason=cpu.reason)


def test_all_variants_are_known_best_first() -> None:
    assert set(cpu.runnable) <= set(cpu.built) <= set(cpu.VARIANTS)
    assert list(cpu.runnable) == sorted(cpu.runnable, key=cpu.VARIANTS.index)


@needs_kernels
def test_the_best_variant_is_chosen() -> None:
    assert cpu.module is not None
    assert cpu.chosen == cpu.runnable[0]
    assert cpu.module.__name__.endswith(f"._{cpu.chosen}")
    assert cpu.runnable[-1] == "portable"
    assert cpu.reason == ""


@needs_kernels
@pytest.mark.parametrize("name", cpu.runnable)
def test_a_lower_variant_can_be_forced(name: str) -> None:
    before = cpu.chosen, cpu.module
    query, key, value = torch.randn(3, 1, 2, 40, 16)
    expected = continuous_attention(query, key, value, backend="reference")
    with cpu.use_variant(name):
        assert cpu.module is not None
        assert cpu.chosen == name
        assert cpu.module.__name__.endswith(f"._{name}")
        out = continuous_attention(query, key, value, backend="cpu")
    assert (cpu.chosen, cpu.module) == before
    torch.testing.assert_close(out, expected)


@needs_kernels
def test_the_variant_is_put_back_after_an_error() -> None:
    before = cpu.chosen, cpu.module
    with pytest.raises(KeyError), cpu.use_variant("portable"):
        raise KeyError
    assert (cpu.chosen, cpu.module) == before


def test_a_variant_that_cant_run_is_refused() -> None:
    with pytest.raises(ValueError, match="'sse'"), cpu.use_variant("sse"):
        pass


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"built": (), "runnable": (), "chosen": None, "module": None, "reason": "no compiler"}.items():
        monkeypatch.setattr(cpu, name, value)


@pytest.mark.usefixtures("without_kernels")
def test_without_kernels_the_reference_runs() -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 16)
    got = continuous_attention(query, key, value, return_lse=True)
    expected = continuous_attention(query, key, value, return_lse=True, backend="reference")
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    with pytest.raises(NotImplementedError, match=r"backend='cpu'.*no compiler.*reinstall.*backend='reference'"):
        continuous_attention(query, key, value, backend="cpu")
    with pytest.raises(ValueError, match="none is built"), cpu.use_variant("portable"):
        pass


@pytest.mark.usefixtures("without_kernels")
def test_info_says_why_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    info.main([])
    out = capsys.readouterr().out
    assert "none: no compiler" in out
    assert "reinstall" in out


def test_importing_it_without_built_modules(tmp_path: Path) -> None:
    """A copy of the package alone, as an installation without a compiler leaves it."""
    source = Path(str(cpu.__file__))
    folder = tmp_path / "cpu_without_kernels"
    folder.mkdir()
    (folder / "__init__.py").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    for note, reason in ((None, "weren't built"), ("no compiler was found\n", "no compiler was found")):
        if note is not None:
            (folder / "not_built.txt").write_text(note, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(folder.name, folder / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(importlib.import_module("sys").modules, folder.name, package)
            spec.loader.exec_module(package)
        assert package.module is None
        assert package.chosen is None
        assert reason in package.reason
