"""Times the delta net of decode, verification and prompts on the machine's card.

    V100_KERNELS_DIR=DIR PYTHONPATH=tests:scripts/bench:ggml_v100/cuda python scripts/bench/cuda_delta_net.py

Both forms run on the same rows, in a graph, over as many layers as are needed for states to come from memory. On cards
newer than the V100 the tensor instruction is emulated: the figures of the chunked form are those of the kernels of
`compile_kernels.py --bench`, which leave it out.
"""

from __future__ import annotations

import argparse

import numpy as np
from cuda_linear import check_written, copy_bandwidth, open_device

from support.cuda_delta_net import DeltaNet, Work

SHAPES = {"27B": (16, 48, 128), "27B/4": (4, 12, 128)}  # key heads, value heads, head_dim; 27B/4: a rank of four
LAYERS = 12
REPEATS = 15


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 512, 2048])
    arguments = parser.parse_args()
    device = open_device()
    print(f"{device.name}, {device.multiprocessors} SMs, copy {copy_bandwidth(device) / 1e9:.0f} GB/s")
    print("shape   rows  recurrent us  chunked us")
    source = np.random.default_rng(0)
    for name in arguments.shapes:
        net = DeltaNet(*SHAPES[name], source)
        memory = device.put(source.standard_normal((LAYERS, net.value_heads * net.head_dim**2)).astype(np.float32))
        for rows in arguments.rows:
            inputs = net.inputs(rows, source)
            times = []
            for form in ("recurrent", "chunked"):
                layers: list[Work] = []
                for layer in range(min(LAYERS, 1 + 2**14 // rows)):
                    if form == "recurrent":
                        layers.append(net.recurrent(device, inputs, memory, [rows], [layer], [layer]))
                    else:
                        layers.append(net.chunked(device, inputs, memory, [rows], [0], [layer], [layer]))

                def work(layers: list[Work] = layers) -> None:
                    for layer in layers:
                        layer.launch()

                times.append(device.milliseconds(device.graph(work), REPEATS) * 1e3 / len(layers))
                for layer in layers:
                    check_written(layer.y, f"{name} {rows} {form}: y")
            print(f"{name:6} {rows:5} {times[0]:13.1f} {times[1]:11.1f}", flush=True)


if __name__ == "__main__":
    main()
