"""What the guide says of each fact holds for the figures that stand beside it."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

import lightning_remat

EXAMPLES = Path(lightning_remat.__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The script's figures; it runs once."""
    path = tmp_path_factory.mktemp("facts") / "facts.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        patch.setattr(sys, "argv", ["guide_facts.py", "--json", str(path)])
        runpy.run_path(str(EXAMPLES / "guide_facts.py"), run_name="__main__")
    found: dict[str, float] = json.loads(path.read_text())
    return found


def test_activations_are_most_of_a_step_and_full_drops_them(figures: dict[str, float]) -> None:
    assert figures["full_share"] < 0.25
    assert figures["kept"] > 5 * figures["kept_parameters"]
    assert figures["kept_no_grad"] == 4  # the loss


def test_what_is_kept_grows_with_batch_depth_and_sequence(figures: dict[str, float]) -> None:
    """In proportion; where attention is not fused, with the square of the sequence in part."""
    assert figures["kept_batch_2"] == pytest.approx(2, abs=0.001)
    assert figures["kept_depth_2"] == pytest.approx(2, abs=0.05)
    assert figures["kept_sequence_4"] == pytest.approx(4, abs=0.01)
    assert figures["kept_sequence_2_eager"] > 2.2
    assert figures["kept_sequence_4_eager"] > 5.5


def test_block_borders_are_what_full_keeps(figures: dict[str, float]) -> None:
    """One border for each block and one after the last, and the rest is what lies outside of blocks."""
    assert figures["borders"] < figures["borders_kept"] < 2 * figures["borders"]
    assert figures["borders_share"] < 0.1


def test_about_a_third(figures: dict[str, float]) -> None:
    """4/3 to the end of each block; less where the last product is left out, which checkpointing does not do here
    under dropout, and the tape does.
    """
    assert figures["flops_checkpoint_to_the_end"] == pytest.approx(4 / 3, abs=1e-9)
    assert figures["flops_checkpoint_short"] == pytest.approx(1.222, abs=0.001)
    assert figures["flops_checkpoint"] == pytest.approx(1.238, abs=0.001)
    assert figures["flops_checkpoint_dropout"] == pytest.approx(4 / 3, abs=1e-9)
    assert figures["flops_full"] == figures["flops_full_dropout"] == figures["flops_checkpoint"]
    assert figures["flops_selective_dropout"] == 1


def test_square_root(figures: dict[str, float]) -> None:
    """4 times as many layers: 4 times the memory plainly, twice with segments of the square root."""
    assert figures["chain_64_plain"] / figures["chain_16_plain"] == pytest.approx(4, abs=0.2)
    assert figures["chain_64_sqrt"] / figures["chain_16_sqrt"] == pytest.approx(2, abs=0.05)
    assert figures["chain_64_every_8"] == figures["chain_64_sqrt"] == pytest.approx(16, abs=0.1)
    assert min(figures[f"chain_64_every_{k}"] for k in (2, 4, 16, 32)) > figures["chain_64_every_8"]


def test_selective_saves_without_a_matrix_product_more(figures: dict[str, float]) -> None:
    assert figures["selective_extra_flops"] == 0
    assert figures["full_extra_flops"] == pytest.approx(0.234, abs=0.01)
    for kind in ("fused", "eager"):
        assert 0.3 < figures[f"selective_saved_{kind}"] < 0.45
        assert 0.75 < figures[f"full_saved_{kind}"] < 0.85


def test_more_fits(figures: dict[str, float]) -> None:
    """Batches and sequences as long as the page says: more than four times, and one and a half times."""
    assert figures["largest_batch_full"] > 4 * figures["room_batch"]
    assert figures["longest_full"] > 4 * figures["room_context"]
    assert figures["largest_batch_selective"] == 1.5 * figures["room_batch"]
    assert figures["longest_selective"] > 1.5 * figures["room_context"]


def test_plan_and_offload(figures: dict[str, float]) -> None:
    """The plan's peak is the predicted one, within the budget, with some of the ops run again."""
    assert figures["planned_peak"] == figures["planned_predicted"] <= figures["planned_budget"]
    assert 0 < figures["planned_again"] < figures["planned_of"]  # which ones depends on how long they took
    assert figures["offload_peak_offload_only"] < 0.15 * figures["offload_plain"]
    assert figures["offload_out"] > 0.8 * figures["kept"]


def test_one_policy_on_three_models(figures: dict[str, float]) -> None:
    assert figures["selective_of_plain_gpt"] < 0.65
    assert figures["selective_of_plain_cnn"] == pytest.approx(0.8, abs=0.03)
    assert figures["selective_of_plain_lstm"] > 0.9
