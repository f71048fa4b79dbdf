#!/usr/bin/env python3
"""What a decode step with layers on the host would take if nothing but the bus and the layers' own
time counted, beside what it took.

    scripts/fetch_model.py batches.jsonl        a file of scripts/gpu_bench.sh --parts batches

From three measured steps of the same sequences: of `full`, of `omnikv` with all K/V on the card, and
of `omnikv` with its sparse layers on the host. The first two give the time of a dense and of a
sparse layer; the third gives the bytes that each layer on the host misses. The model:
  - layers follow each other, each with its own time;
  - a filter layer has selected once its attention has run;
  - from then on the bus brings the missing rows of the layers that read the selection, one layer
    after the other, at the rate that the run measured for gathered rows;
  - a layer's attention starts when its rows are there.
A file without the three cases is an error.
"""

import json
import sys

N_LAYERS = 32  # of llama3-8b, as its parts below
# Share of a layer's weights that is read before its attention: wq, wk and wv of 218.1 M values.
BEFORE_ATTENTION = (4096 * 4096 + 2 * 4096 * 1024) / (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
HEAD = 4096 * 128256 / (N_LAYERS * 218103808)  # the last product, in parts of all layers' weights


def step_ms(dense, sparse, head, filters, dense_layers, ms_per_fetch):
    """Milliseconds of a step whose sparse layers each take ms_per_fetch on the bus."""
    now = 0.0  # on the card
    bus = 0.0  # the bus is free from then on
    arrives = {}  # when the rows of a layer are there
    for layer in range(N_LAYERS):
        is_dense = layer in dense_layers
        time = dense if is_dense else sparse
        before = BEFORE_ATTENTION * sparse
        start = max(now + before, arrives.get(layer, 0.0))
        if layer in filters:
            bus = max(bus, start + dense - sparse)  # its attention has run
            for reader in range(layer + 1, N_LAYERS):
                if reader in filters:
                    break
                if reader not in dense_layers:
                    bus += ms_per_fetch
                    arrives[reader] = bus
        now = start + time - before
    return now + head


def settings_of(case):
    return dict(pair.split("=", 1) for pair in case["settings"].split())


def main(path):
    cases = {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if "report" in record:
                cases[record["case"]] = record["report"]["cases"][0]
    try:
        full, near = cases["full_batch8"], cases["omnikv_batch8"]
    except KeyError as missing:
        sys.exit(f"{path} has no case {missing}, expected full_batch8 and omnikv_batch8")
    filters = [int(f) for f in settings_of(near)["filters"].split(",")]
    after = int(settings_of(near)["dense_after_filter"])
    dense_layers = set(range(filters[0])) | set(filters)
    dense_layers |= {f + 1 for f in filters if after}
    n_sparse = N_LAYERS - len(dense_layers)
    saved = (full["ms_per_token"] - near["ms_per_token"]) / n_sparse  # dense less sparse layer
    # The head takes the time of its share of the weights: what is left of full's step, less attention.
    weights = (full["ms_per_token"] - N_LAYERS * saved) / (1 + HEAD)
    head = HEAD * weights
    sparse = weights / N_LAYERS
    dense = sparse + saved
    modelled = step_ms(dense, sparse, head, filters, dense_layers, 0.0)
    print(f"layers: dense {dense:.3f} ms, sparse {sparse:.3f} ms; without fetches "
          f"{modelled:.3f} ms, measured {near['ms_per_token']:.3f} ms")
    for name, case in cases.items():
        if not name.startswith("host_"):
            continue
        gather = case["ceiling"]["pcie_gb_s"]["gather"]
        per_layer = case["transfer_bytes"] / case["host_layers"]
        model = step_ms(dense, sparse, head, filters, dense_layers, per_layer / gather / 1e6)
        # If all that the step takes longer than the model were the bus's delay.
        fetching = case["transfer_bytes"] / gather / 1e6
        rate = fetching / (fetching + max(0.0, case["ms_per_token"] - model))
        print(f"{name}: {case['transfer_bytes'] / 1e6:.1f} MB a step, {100 * case['hit_rate']:.1f} % "
              f"hits; model {model:.3f} ms, measured {case['ms_per_token']:.3f} ms, "
              f"{case['ms_per_token'] / model:.3f} x; {case['ms_per_token'] / near['ms_per_token']:.3f} "
              f"x of all on the card; fetches at {100 * rate:.0f} % of the gather's rate or more")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
