"""What devices can do at best, from their makers' data sheets: what the roofline (``graphs.costs``) goes by."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

from graphs.errors import InputError, quoted

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class DeviceDescription:
    """What a device can do at best.

    name                   for people
    peak_flops             FLOP/s by dtype of the operands; "float32" is needed; "tf32" is what float32 convolutions run at, as
                           they do in torch unless told otherwise; a dtype that is not listed runs at the rate of float32
    bandwidth_bytes_per_s  of its main memory
    launch_ns              what every op costs on top: dispatch and kernel launch; whole
    words                  that are all in the device name torch gives ("NVIDIA A100-SXM4-80GB"), in lower case

    Raises InputError for a rate that is none.
    """

    name: str
    peak_flops: Mapping[str, float]
    bandwidth_bytes_per_s: float
    launch_ns: int = 5_000
    words: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if "float32" not in self.peak_flops:
            raise InputError(f"{self.name}: peak_flops needs the rate of 'float32', that of all dtypes that are not listed")
        rates = {f"peak_flops[{dtype!r}]": rate for dtype, rate in self.peak_flops.items()}
        for what, rate in (rates | {"bandwidth_bytes_per_s": self.bandwidth_bytes_per_s}).items():
            if not isinstance(rate, Real) or not 0 < rate < math.inf:
                raise InputError(f"{self.name}: {what} must be a number above 0, not {quoted(rate)}")
        if type(self.launch_ns) is not int or self.launch_ns < 0:
            raise InputError(f"{self.name}: launch_ns must be an int >= 0, not {quoted(self.launch_ns)}")


def _gpu(name: str, words: str, bandwidth: float, **tera_flops: float) -> DeviceDescription:
    rates = {dtype: rate * TERA for dtype, rate in tera_flops.items()}
    return DeviceDescription(name, rates, bandwidth * GIGA, words=frozenset(words.lower().split()))


# Dense rates (no sparsity), at boost clock, matrix units where the format has them; SXM versions where no other is named.
DEVICES: Mapping[str, DeviceDescription] = {
    # Two cores with AVX2 at 2.5 GHz (2 fused multiply-adds of 8 floats a cycle and core) on one channel of DDR4.
    "cpu": DeviceDescription("two CPU cores", {"float32": 160 * GIGA, "float64": 80 * GIGA}, 20 * GIGA),
    "titan_v": _gpu("TITAN V", "TITAN V", 652.8, float32=14.9, float64=7.45, float16=110),
    "v100": _gpu("V100", "V100", 900, float32=15.7, float64=7.8, float16=125),
    "t4": _gpu("T4", "T4", 320, float32=8.1, float16=65),
    "a100_40gb": _gpu("A100 40GB", "A100 40GB", 1555, float32=19.5, float64=19.5, tf32=156, float16=312, bfloat16=312),
    "a100": _gpu("A100 80GB", "A100", 2039, float32=19.5, float64=19.5, tf32=156, float16=312, bfloat16=312),
    "h100": _gpu("H100", "H100", 3350, float32=67, float64=67, tf32=494.7, float16=989.4, bfloat16=989.4),
    "h100_pcie": _gpu("H100 PCIe", "H100 PCIe", 2000, float32=51, float64=51, tf32=378, float16=756, bfloat16=756),
    "h200": _gpu("H200", "H200", 4800, float32=67, float64=67, tf32=494.7, float16=989.4, bfloat16=989.4),
    "l40s": _gpu("L40S", "L40S", 864, float32=91.6, float64=1.43, tf32=183, float16=362, bfloat16=362),
    "b200": _gpu("B200", "B200", 8000, float32=80, float64=40, tf32=1100, float16=2250, bfloat16=2250),
}


def device_called(name: str) -> DeviceDescription | None:
    """The description that fits a name that torch gives a device best; None where there is none, as for a slice (MIG)."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    fitting = [each for each in DEVICES.values() if each.words and each.words <= words and "mig" not in words]
    return max(fitting, key=lambda each: len(each.words), default=None)
