"""The power that turns priorities into masses is bit-identical on every machine."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import numpy as np
import pytest

import shmbuffer
from shmbuffer._native import _core
from shmbuffer.memory.format import priorities
from tests.memory import power_oracle

NATIVE = Path(shmbuffer.__file__).parent / "_native"
ALPHAS = [0.0, 1e-3, 0.1, 0.4, 0.5, 0.6, 0.7, 0.9, 1.0, 1.5, 2.0, 3.0, 90.0, 1e300]
ODD = [0.0, 5e-324, 1e-310, 2.0**-1022, 1e-300, 1.0, 1e300, 1.7e308, math.inf, math.nan, -1.0]


def ordinary(seed: int, count: int = 4001) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    rng = np.random.default_rng(seed)
    return rng.random(count) * 10.0 ** rng.integers(-9, 9, count)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_masses_are_those_of_the_oracle_to_the_last_bit(alpha: float) -> None:
    anything = np.random.default_rng(1).integers(0, 0x7FF0 << 48, 2001, np.uint64).view(np.float64)
    for raw in (ordinary(2), anything, np.array(ODD)):
        found, expected = (f(raw, alpha, 0.0) for f in (priorities.mass_of, power_oracle.masses_of))
        assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.product(few=3)
@pytest.mark.parametrize("alpha", [alpha for alpha in ALPHAS if alpha <= 3])
def test_they_are_powers_within_a_few_units_in_the_last_place(alpha: float) -> None:
    raw = ordinary(3)
    expected = [math.pow(one + 1e-8, alpha) for one in raw]
    assert priorities.mass_of(raw, alpha, 1e-8) == pytest.approx(expected, rel=6e-16, abs=0)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_an_exponent_of_zero_or_one_is_exact(alpha: float) -> None:
    raw = np.array([*ordinary(4), *ODD[:-3]])
    assert priorities.mass_of(raw, alpha, 0.0).tolist() == [math.pow(one, alpha) for one in raw]


def test_a_mass_does_not_depend_on_what_is_computed_beside_it() -> None:
    raw = np.array([*ordinary(5, 37), *ODD])
    together = priorities.mass_of(raw, 0.6, 0.0)
    alone = [priorities.mass_of(raw[at : at + 1], 0.6, 0.0)[0] for at in range(len(raw))]
    assert np.array_equal(together, alone, equal_nan=True)


def test_buffers_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="float64 buffers of the same size"):
        _core.powers(np.zeros(2), 0.0, 0.5, np.zeros(3))


PROGRAM = r"""
#define SHMB_CRASHPOINT_H
#define CP(point) ((void)0)
#include "core/layout.c"
#include "core/power.c"
#include "core/tree.c"
#include <stdio.h>
#define COUNT 1003
#define LEAVES 70001 /* of which the lowest level of nodes is listed, and not marked */
int main(void) {
#if defined(__x86_64__)
    static double raw[COUNT], two[COUNT], four[COUNT];
    const double alphas[] = {0, 0.1, 0.5, 0.6, 1, 2, 90};
    if (!has_avx2()) return 2;
    for (int round = 0; round < 2 * 7; round++) {
        for (uint64_t i = 0, bits = 1; i < COUNT; i++) {
            bits = bits * 6364136223846793005u + 1442695040888963407u;
            raw[i] = round % 2 ? from_bits(bits >> 1) : (double)(bits >> 40) / 65536;
        }
        powers_by_two(raw, 1e-8, alphas[round / 2], two, COUNT);
        powers_by_four(raw, 1e-8, alphas[round / 2], four, COUNT);
        if (memcmp(two, four, sizeof two)) return 1;
    }
    static unsigned char slots[2][1 << 22];
    static uint64_t at[2][COUNT];
    struct shmb_sections sections;
    struct shmb_tree trees[2] = {0};
    shmb_compute_sections(LEAVES, 1, false, 0, &sections);
    if (sections.bytes > sizeof slots[0]) return 3;
    for (int tree = 0; tree < 2; tree++) shmb_tree_map(&trees[tree], &sections, slots[tree]);
    for (uint64_t round = 0, bits = 1; round < 100; round++) {
        for (uint64_t i = 0; i < COUNT; i++) {
            bits = bits * 6364136223846793005u + 1442695040888963407u;
            at[0][i] = at[1][i] = (bits >> 40) % LEAVES;
            double mass = bits >> 38 & 3 ? (double)(bits >> 30) / 3 : 0;
            trees[0].mass[at[0][i]] = trees[1].mass[at[0][i]] = mass;
        }
        update_by_two(&trees[0], at[0], COUNT);
        update_by_four(&trees[1], at[1], COUNT);
        if (memcmp(slots[0], slots[1], sections.bytes)) return 1;
        if (shmb_tree_count_faults(&trees[0], LEAVES)) return 1;
    }
    return 0;
#else
    return 2;
#endif
}
"""


@pytest.mark.full
def test_two_at_a_time_give_the_same_as_four(tmp_path: Path) -> None:
    if not (NATIVE / "core/power.c").exists():
        pytest.skip("the C sources are not installed")
    (tmp_path / "agree.c").write_text(PROGRAM)
    binary = tmp_path / "agree"
    command = ["gcc", "-std=gnu11", "-O3", "-ffp-contract=off", "-fno-trapping-math"]
    command += [f"-I{NATIVE}", "-o", str(binary), "agree.c", "-lm"]
    try:
        subprocess.run(command, cwd=tmp_path, check=True)
    except FileNotFoundError:
        pytest.skip("no compiler")
    status = subprocess.run([binary]).returncode
    if status == 2:
        pytest.skip("this processor has no AVX2")
    assert status == 0
