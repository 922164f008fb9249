from dataclasses import replace

import pytest

from kbx_env.backends.cost import LaunchFacts, estimate_us, load, names, occupancy
from kbx_env.backends.cost.devices import path
from kbx_env.errors import UnknownName, UsageError

COPY = LaunchFacts(
    "copy", programs=4096, num_warps=4, registers=32, loaded_bytes=1 << 24, stored_bytes=1 << 24,
    unique_loaded=1 << 24, unique_stored=1 << 24, loaded_sectors=1 << 19, stored_sectors=1 << 19,
    alu_flops=1 << 23, load_rounds=1,
)  # fmt: skip
PRODUCT = LaunchFacts(
    "matmul", programs=256, num_warps=8, registers=128, shared_bytes=98304, loaded_bytes=1 << 28, unique_loaded=1 << 24,
    loaded_sectors=1 << 23, dot_flops={"f16*f16->f32": 2.0**34}, load_rounds=12, syncs=32,
)  # fmt: skip


def us(*facts, device="h200"):
    return estimate_us(facts, load(device)).estimated_us


@pytest.mark.parametrize("name", names())
def test_every_device_says_where_its_numbers_come_from(name):
    d = load(name)
    assert d.sources["peaks"] == "datasheet" and d.sources["reference"]
    assert d.sources["constants"] == "unfitted" or d.sources["constants"].startswith("fitted to ")
    assert d.registers == 65536 and d.tensor_tflops["f16"] > 100 and d.dram_gbs > 500
    assert us(COPY, device=name) > 0 and us(PRODUCT, device="h200") > 0


def test_an_unknown_device_lists_the_names():
    with pytest.raises(UnknownName) as e:
        load("h300")
    assert {"h200", "h100", "a100", "rtx5090"} <= set(e.value.accepted)
    assert "h200" in str(e.value)
    assert not path("h300").exists()


def test_more_traffic_costs_more():
    before = us(COPY)
    for k in range(1, 8):
        n = 2.0**k
        more = replace(
            COPY,
            unique_loaded=COPY.unique_loaded * n,
            loaded_sectors=COPY.loaded_sectors * n,
            loaded_bytes=COPY.loaded_bytes * n,
        )
        assert us(more) > before
        before = us(more)


@pytest.mark.parametrize(
    "field", ["alu_flops", "special_flops", "syncs", "load_rounds", "atomic_lines", "loaded_sectors"]
)
def test_more_work_of_one_kind_costs_more(field):
    times = [us(replace(COPY, **{field: x})) for x in (2.0**20, 2.0**26, 2.0**32)]
    assert times[0] < times[1] < times[2]


def test_more_launches_cost_more():
    assert us(COPY) < us(COPY, COPY) < us(COPY, COPY, COPY) < 3 * us(COPY)
    assert us() == 0.0


def test_the_estimate_tells_its_parts():
    e = estimate_us([PRODUCT, COPY], load("h200"))
    assert set(e.parts) == {"launch", "dram", "l2", "tensor", "alu", "special", "atomics", "latency"}
    assert len(e.occupancy) == len(e.waves) == 2
    assert max(e.parts, key=lambda k: e.parts[k]) == e.bound_by
    assert max(e.parts.values()) <= e.estimated_us <= sum(e.parts.values())


def test_products_run_at_the_rate_of_their_kind():
    def tensor(kind):
        return estimate_us([replace(PRODUCT, dot_flops={kind: 2.0**38})], load("h200")).parts

    assert tensor("i8*i8->i32")["tensor"] < tensor("bf16*bf16->f32")["tensor"] < tensor("tf32")["tensor"]
    assert tensor("tf32x3")["tensor"] == pytest.approx(3 * tensor("tf32")["tensor"])
    # Exact fp32 products have no tensor cores.
    assert tensor("f32*f32->f32")["tensor"] == 0 and tensor("f32*f32->f32")["alu"] > tensor("tf32")["tensor"]


def test_a_faster_memory_is_faster():
    assert us(COPY, device="h200") < us(COPY, device="h100") < us(COPY, device="a100")


@pytest.mark.parametrize(
    "registers,shared,warps,blocks,by",
    [
        # 65536 registers, 32 per thread are 1024 per warp: 64 warps, as many as an SM holds.
        (32, 0, 4, 16, "warps"),
        # 33 registers are allocated as 40: 1280 per warp, 12 warps in each quarter.
        (33, 0, 4, 12, "registers"),
        (255, 0, 4, 2, "registers"),
        (255, 0, 8, 1, "registers"),
        # 168 registers are 5376 per warp: 3 warps of each quarter's 16384, 12 in all.
        (168, 0, 4, 3, "registers"),
        (16, 0, 1, 32, "blocks"),
        # 228 KB of an SM, 1 KB per program reserved.
        (32, 65536, 4, 3, "shared memory"),
        (32, 232448, 4, 1, "shared memory"),
        (64, 0, 32, 1, "registers"),
    ],
)
def test_occupancy_of_sm_90(registers, shared, warps, blocks, by):
    o = occupancy(registers, shared, warps, load("h200"))
    assert (o.blocks, o.warps, o.limited_by) == (blocks, blocks * warps, by)
    assert o.share == o.warps / 64


def test_occupancy_of_sm_80():
    assert occupancy(32, 65536, 4, load("a100")).blocks == 2
    assert occupancy(32, 163840, 4, load("a100")).blocks == 1


def test_occupancy_of_consumer_gpus_has_fewer_warps():
    assert occupancy(16, 0, 8, load("rtx5090")).warps == 48


def test_a_program_that_does_not_fit():
    with pytest.raises(UsageError, match="shared memory"):
        occupancy(32, 200000, 4, load("a100"))
    with pytest.raises(UsageError, match="registers"):
        occupancy(255, 0, 16, load("h200"))


def test_spills_cost_only_at_the_cap_of_registers():
    full = replace(COPY, registers=255, local_bytes=2048)
    assert us(full) > us(replace(full, local_bytes=0))
    assert us(replace(COPY, local_bytes=2048)) == us(COPY)


def test_facts_survive_a_round_trip():
    assert LaunchFacts.from_dict(PRODUCT.to_dict()) == PRODUCT
    assert PRODUCT.sectors == 1 << 23 and COPY.unique_bytes == 1 << 25
