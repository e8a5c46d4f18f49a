"""Clusters from files: what a field changes, costs worked by hand, and the table of GPUs."""

import pytest

from megajax.config import ConfigError
from megajax.estimate.gpus import GPUS, find_gpu, published_peak
from megajax.estimate.rates import MATMUL_SHARE, rates_of
from megajax.plan import dryrun
from megajax.plan.cluster import Cluster, load_cluster


def written(tmp_path, text):
    path = tmp_path / "ours.toml"
    path.write_text(text)
    return str(path)


def test_a_file_with_its_gpu_only_is_the_vendors_machine(tmp_path):
    cluster = load_cluster(written(tmp_path, 'gpu = "h100-80gb"'))
    assert cluster == Cluster("ours", find_gpu("h100-80gb"), watts=700.0)


def test_rails_and_oversubscription_are_the_networks_bandwidth(tmp_path):
    """Four rails of 200 Gb/s for eight GPUs: 12.5 GB/s each; half of it beyond the first switches."""
    text = 'gpu = "h100-80gb"\nrails = 4\nrail_gbits = 200\noversubscription = 2\nhost_gbytes = 64\nhost_size = 8'
    gpu = load_cluster(written(tmp_path, text)).gpu
    assert gpu.network_bandwidth == 12.5e9 and gpu.network_share == pytest.approx(0.4) and gpu.host_bandwidth == 64e9
    # an all-gather of 16 GB over 16 hosts with one GPU each in the group: 15 GB at 5 GB/s, and the latencies
    seconds = rates_of(gpu, "bf16").collective("all-gather", 15e9, 16, 1)
    assert seconds == pytest.approx(3.0, rel=1e-3)


def test_the_cost_by_hand():
    """100 GPUs for 10 days at 2 an hour, 1 kW each in a building that takes a fifth more."""
    cluster = Cluster("a", find_gpu("h100-80gb"), 100, price=2.0, currency="EUR", watts=1000.0, pue=1.2)
    cost = cluster.cost(100, 10)
    assert (cost.gpu_hours, cost.money, cost.megawatt_hours) == (24_000, 48_000, pytest.approx(28.8))
    assert cluster.describe(cost) == "24,000 GPU hours, 48,000 EUR, 28.8 MWh"
    assert Cluster.of_gpu(find_gpu("h100-80gb")).cost(1, 1).money is None


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_every_gpu_of_the_table_can_be_priced(gpu):
    """The fields are within the bounds of what was ever built, and in the units that they are said to be in."""
    assert published_peak(gpu.device_kind, "bf16") == gpu.peak("bf16") and 60e12 < gpu.peak("bf16") < 3e15
    assert 20e9 < gpu.memory < 300e9 and 0.5e12 < gpu.memory_bandwidth < 1e13
    assert gpu.network_bandwidth < gpu.host_bandwidth < gpu.memory_bandwidth and 100 <= gpu.watts <= 1500
    assert rates_of(gpu, "bf16").matmul > 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no gpu: write a line such as"),
        ("gpu = 3", "gpu = 3 must be a text that is not empty"),
        ('gpu = "h100"', "gpu = 'h100' is not known: did you mean h100"),
        ('gpu = "b200"\nprise = 2', "prise is not a field: did you mean price"),
        ('gpu = "b200"\nprice = -1', "price = -1 must be a number from 0 to 1e+06"),
        ('gpu = "b200"\nprice = true', "price = True must be a number"),
        ('gpu = "b200"\ngpus = 2.5', "gpus = 2.5 must be a whole number from 1 to 1e+06"),
        ('gpu = "b200"\nrails = 8', "has one of rails and rail_gbits"),
        ('gpu = "b200"\noversubscription = 0.5', "oversubscription = 0.5 must be a number from 1 to 1000"),
        ("gpu = ", "is not a TOML file"),
        ('gpu = "b200"\npue = nan', "pue = nan must be a number from 1 to 10"),
    ],
)
def test_a_wrong_file_is_one_line(text, says, tmp_path):
    with pytest.raises(ConfigError) as error:
        load_cluster(written(tmp_path, text))
    assert says in str(error.value) and "\n" not in str(error.value)


OWN = '[gpu]\nname = "ours"\nlike = "h100-80gb"\n'


def test_a_gpu_of_ones_own(tmp_path):
    """What it has itself, and what it has of the GPU that it is like; products at the shares of its peak by size."""
    text = OWN + "peak_teraflops = [800, 400]\nmemory_gbytes = 96\nmemory_bandwidth_gbytes = 3000\nwatts = 600\n"
    cluster = load_cluster(written(tmp_path, "rails = 8\nrail_gbits = 100\n" + text))
    gpu, base = cluster.gpu, find_gpu("h100-80gb")
    assert (gpu.name, gpu.peak("bf16"), gpu.peak("fp32"), gpu.memory) == ("ours", 800e12, 400e12, 96e9)
    assert (cluster.watts, gpu.network_bandwidth, gpu.cores, gpu.family) == (600, 12.5e9, base.cores, "h100")
    assert rates_of(gpu, "bf16").matmul == pytest.approx(MATMUL_SHARE["h100"] * 800e12)
    assert rates_of(gpu, "bf16").memory == pytest.approx(0.75 * 3000e9)
    own = load_cluster(written(tmp_path, text + "efficiency = [[1e12, 0.7], [1e10, 0.3]]")).gpu
    rates = rates_of(own, "bf16")
    seconds = [rates.product(size, 1e6, 1e6) for size in (1e9, 1e11, 1e13)]
    assert seconds == pytest.approx([1e9 / 240e12, 1e11 / 400e12, 1e13 / 560e12])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[gpu]\nname = "ours"', "gpu.like = None must be a text"),
        (OWN + "memory = 3", "gpu.memory is not a field: did you mean memory_gbytes"),
        (OWN + "memory_gbytes = -1", "gpu.memory_gbytes = -1 must be a number from 1 to 100000"),
        (OWN + "peak_teraflops = 800", "gpu.peak_teraflops = 800 must be a list: of 16 bits, of fp32"),
        (OWN + "efficiency = [[1e9]]", "must be a list of pairs"),
        (OWN + "efficiency = [[1e9, 2]]", "gpu.efficiency = 2 must be a number from 0.0001 to 1"),
        (OWN + "efficiency = [[1e9, 0.2]]\n[measured]\ncopy_gbytes = 9", "has gpu.efficiency, and [measured]"),
    ],
)
def test_a_wrong_gpu_of_ones_own_is_one_line(text, says, tmp_path):
    with pytest.raises(ConfigError) as error:
        load_cluster(written(tmp_path, text))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_no_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read: .*; pass --cluster FILE.toml"):
        load_cluster(str(tmp_path / "none.toml"))


def test_nothing_is_compiled_for_another_vendors_gpu(capsys):
    words = "--model gpt3-125m --gpu mi300x --data 2 --global-batch-size 8"
    assert dryrun.main(words.split()) == 2
    assert (
        "gpu = mi300x is not NVIDIA's, whose GPUs alone are compiled for: pass --model-only" in capsys.readouterr().err
    )
    assert dryrun.main([*words.split(), "--model-only"]) == 0
