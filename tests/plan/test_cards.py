"""Cards by the names that nvidia-smi and people give them."""

import pytest

from trainer.plan.cards import CARDS, card_of

NAMES = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA A100-SXM4-80GB": "A100", "NVIDIA A100 80GB PCIe": "A100 80GB PCIe"}
NAMES |= {"NVIDIA H100 NVL": "H100 NVL", "NVIDIA A10": "A10"}
NAMES |= {"NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada", "Quadro RTX 4000": "Quadro RTX 4000"}
NAMES |= dict.fromkeys(("NVIDIA GeForce RTX 4060", "rtx4060", "RTX\u00a04060", "4060"), "RTX 4060")
NAMES |= dict.fromkeys(("NVIDIA GeForce RTX 4060 Ti", "rtx4060ti"), "RTX 4060 Ti")
NAMES |= dict.fromkeys(("NVIDIA GeForce RTX 4060 Laptop GPU", "4060 laptop"), "RTX 4060 Laptop")
NAMES |= {"RTX 4070 Ti SUPER": "RTX 4070 Ti Super", "NVIDIA GeForce RTX 4090 D": "RTX 4090 D"}
NAMES |= {"NVIDIA GeForce RTX 2050": "RTX 2050", "RTX 3050 Ti Laptop GPU": "RTX 3050 Ti Laptop"}
NAMES |= {"NVIDIA GeForce RTX 2070 with Max-Q Design": "RTX 2070"}


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_known_by_its_names(name):
    found = card_of(name)
    assert (found.name, found.speed) == (name, CARDS[NAMES[name]].speed)


OTHERS = ["", "Voodoo 2", "AMD Instinct MI300X", "Radeon RX 9070 XT", "Intel Arc A770", "B580", "CPU with AVX2"]
OTHERS += ["GTX 1080", "Tesla V100-PCIE-16GB", "RTX 6060 Ti", "A800"]


@pytest.mark.parametrize("name", OTHERS)
def test_another_card_is_not_known(name):
    assert card_of(name) is None


@pytest.mark.parametrize(("name", "gigabytes"), [
    ("RTX 3060", 12), ("RTX 4060 Ti", 8), ("RTX 4060 Ti 16GB", 16), ("NVIDIA A100-SXM4-80GB", 80), ("a100", 40),
])  # fmt: skip
def test_a_card_has_the_memory_of_its_name_or_else_of_the_smallest(name, gigabytes):
    assert card_of(name).memory_gb == gigabytes


# The shares of a card that a slice has of its speed and of its memory, and the gigabytes.
SLICES = {"A100-SXM4-40GB MIG 1g.5gb": (1 / 7, 1 / 8, 5), "A100-SXM4-80GB MIG 3g.40gb": (3 / 7, 1 / 2, 40)}
SLICES |= {"H100 80GB HBM3 MIG 1g.10gb+me": (1 / 7, 1 / 8, 10), "H100 80GB HBM3 MIG 1c.3g.40gb": (1 / 7, 1 / 2, 40)}
SLICES |= {"H100 80GB HBM3 MIG 4g.40gb": (4 / 7, 1 / 2, 40), "H100 PCIe MIG 2g.20gb": (2 / 7, 2 / 8, 20)}
SLICES |= {"H200 MIG 7g.141gb": (1, 1, 141), "A30 MIG 1g.6gb": (1 / 4, 1 / 4, 6), "A30 MIG 4g.24gb": (1, 1, 24)}


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_of_a_card_is_its_fraction(name):
    share, memory, gigabytes = SLICES[name]
    like = "H100 PCIe" if "PCIe" in name else name.replace("-", " ").split()[0]
    found, whole = card_of(f"NVIDIA {name}"), CARDS[like].speed
    assert found.speed[:2] == pytest.approx((share * whole.flops, memory * whole.bandwidth))
    assert found.memory_gb == gigabytes


CORES = {"2070": (2304, 1.62), "2080 Super": (3072, 1.815), "3060 Ti": (4864, 1.665), "3080": (8704, 1.71)}  # and GHz
CORES |= {"3050": (2560, 1.777), "4060": (3072, 2.46), "4060 Laptop": (3072, 2.37), "4070": (5888, 2.475)}
CORES |= {"4070 Ti Super": (8448, 2.61), "5060": (3840, 2.497), "5060 Ti": (4608, 2.572), "5080": (10752, 2.617)}
CORES |= {"5070 Laptop": (4608, 2.347)}


@pytest.mark.parametrize("name", CORES)
def test_a_gaming_card_has_the_peak_of_sums_in_fp32(name):
    """Cores times their boost clock: its tensor cores do 4 operations a cycle for each, and those of Turing 8."""
    count, clock = CORES[name]
    of_core = 8 if name.startswith("2") else 4  # operations in a cycle
    assert CARDS[f"RTX {name}"].speed.flops / 1e9 == pytest.approx(of_core * count * clock, rel=0.01)


@pytest.mark.parametrize("name", [name for name, card in CARDS.items() if card.larger])
def test_a_card_that_is_made_with_more_memory_says_how_that_one_is_named(name):
    larger = card_of(CARDS[name].larger)
    assert CARDS[name].larger in card_of(name).size
    assert (larger.memory_gb > CARDS[name].memory_gb, larger.speed, larger.larger) == (True, CARDS[name].speed, "")
