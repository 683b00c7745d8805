"""Presets have the parameter counts that their makers publish."""

from __future__ import annotations

import pytest

from common.config import ConfigError
from scale_across.model_presets import load_model, preset_names

# Totals of the weight files on the Hub (safetensors metadata).
EXACT = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-7b": 8_537_680_896,
    "gemma-2-9b": 9_241_705_984,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
# (billion in all, billion active) as announced.
ANNOUNCED = {
    "deepseek-v2": (236, 21),
    "deepseek-v3": (671, 37),
    "llama-4-scout": (109, 17),
    "llama-4-maverick": (400, 17),
    "mixtral-8x22b": (141, 39),
    "qwen3-235b-a22b": (235, 22),
    "nemotron-4-340b": (341, 341),
    "gpt-3-175b": (175, 175),
}


@pytest.mark.parametrize("name", EXACT)
def test_published_totals(name: str) -> None:
    assert load_model(name).parameters == EXACT[name]


@pytest.mark.parametrize("name", ANNOUNCED)
def test_announced_sizes(name: str) -> None:
    shape = load_model(name)
    total, active = ANNOUNCED[name]
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.015)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.025)


def test_published_model_flops() -> None:
    """NVIDIA's DGX Cloud benchmarks (2025), per sequence of 8192: 405B 2.17e16, Maverick 8.92e14."""
    assert load_model("llama-3.1-405b").flops(8192).model.total() == pytest.approx(2.17e16, rel=0.01)
    assert load_model("llama-4-maverick").flops(8192).model.total(causal=True) == pytest.approx(8.92e14, rel=0.002)


def test_every_preset_loads_under_the_names_people_write() -> None:
    assert len(preset_names()) > 30
    for name in preset_names():
        assert load_model(name).name == name
    for written in ("Llama-3.1-405B", "meta-llama/Llama-3.1-405B-Instruct", "Llama 3 405B"):
        assert load_model(written).name == "llama-3.1-405b"
    with pytest.raises(ConfigError, match=r"no such preset or file; did you mean llama-3\.1-8b"):
        load_model("lama-3.1-8b")
    with pytest.raises(ConfigError, match=r"model '\./x\.json': no such file"):
        load_model("./x.json")
