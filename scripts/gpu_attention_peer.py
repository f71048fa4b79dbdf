#!/usr/bin/env python3
"""PyTorch's attention on this machine's card, on the shapes of our own kernel benchmarks.

    scripts/gpu_attention_peer.py [--read-gb-s N] [--quick]

32 query heads over 8 KV heads of 128 in bf16, the backends flash and cuDNN of
torch.nn.functional.scaled_dot_product_attention:
  decode   1 row over 4K, 32K, 128K and 512K tokens: GB/s of K/V, as a share of the read bandwidth
           (--read-gb-s, as cuda_attend_bench --json measured it; else measured here)
  prefill  causal, 8K, 32K and 128K rows, and 4,096 rows at the end of 32K and 128K: TFLOP/s
Each backend is tried in every form that it takes of the same attention, and the fastest counts:
KV heads shared by enable_gqa, or the 4 query heads of a KV head as 4 rows (decode), or K/V repeated
for every query head (prefill: what is repeated is small beside the products). cuDNN has no mask
that ends at the lower right: rows at the end of a context are measured over a whole rectangle.

Prints one JSON object; where torch or a card is missing, a line that says so, and exits 0.
"""
import argparse
import json
import statistics
import sys

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    print("skipped: torch is not installed")
    sys.exit(0)
try:
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    print(f"skipped: torch {torch.__version__} has no torch.nn.attention, 2.3 or newer has")
    sys.exit(0)

HEADS, KV_HEADS, DIM = 32, 8, 128
GROUP = HEADS // KV_HEADS
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION}
if hasattr(SDPBackend, "CUDNN_ATTENTION"):
    BACKENDS["cudnn"] = SDPBackend.CUDNN_ATTENTION
DECODE = (4096, 32768, 131072, 524288)
PREFILL = ((8192, 8192), (32768, 32768), (131072, 131072), (4096, 32768), (4096, 131072))
FAILURES = (RuntimeError, TypeError, NotImplementedError, ValueError)


def noise(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def event_seconds(run, repeats):
    """The median time of run(), by events."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def graph_seconds(run, n, repeats=15):
    """The time of one of run(0), ..., run(n - 1), replayed as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # plans and workspaces are made before the capture
        for i in range(n):
            run(i)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n):
            run(i)
    graph.replay()
    torch.cuda.synchronize()
    return event_seconds(graph.replay, repeats) / n


def fastest(backend, forms):
    """The fastest of `forms`, name -> () -> seconds, under `backend`: (name, seconds), else why not."""
    best, reasons = None, {}
    for name, measure in forms.items():
        try:
            with sdpa_kernel(BACKENDS[backend]):
                seconds = measure()
        except FAILURES as error:  # out of memory is a RuntimeError
            reasons[name] = (str(error).strip() or type(error).__name__).split("\n")[0][:200]
            torch.cuda.empty_cache()
            continue
        if best is None or seconds < best[1]:
            best = (name, seconds)
    return best, reasons


def read_bandwidth():
    """GB/s of a sum over 4 GiB: below what a plain read reaches, by little."""
    data = torch.ones(1 << 30, device="cuda", dtype=torch.float32)
    data.sum()
    return data.numel() * 4 / event_seconds(lambda: data.sum(), 10) / 1e9


def decode_cases(read_gb_s, contexts):
    for context in contexts:
        kv_bytes = 2 * context * KV_HEADS * DIM * 2
        # As many layers as are sure to miss the L2 cache, in turn.
        layers = max(2, -(-(512 << 20) // kv_bytes))
        q = noise(1, HEADS, 1, DIM)
        k = [noise(1, KV_HEADS, context, DIM) for _ in range(layers)]
        v = [noise(1, KV_HEADS, context, DIM) for _ in range(layers)]
        launches = 2 * layers if layers < 8 else layers

        def shared(i):
            return F.scaled_dot_product_attention(q, k[i % layers], v[i % layers], enable_gqa=True)

        def rows(i):  # no mask: the rows of a KV head see the same tokens
            return F.scaled_dot_product_attention(
                q.view(1, KV_HEADS, GROUP, DIM), k[i % layers], v[i % layers])

        for backend in BACKENDS:
            case = {"kind": "decode", "backend": backend, "context": context}
            best, reasons = fastest(backend, {"enable_gqa": lambda: graph_seconds(shared, launches),
                                              "rows": lambda: graph_seconds(rows, launches)})
            if best is not None:
                gb_s = kv_bytes / best[1] / 1e9
                case |= {"form": best[0], "us": 1e6 * best[1], "gb_s": gb_s,
                         "share_of_read": gb_s / read_gb_s}
            yield case | ({"not_run": reasons} if reasons else {})
        del k, v
        torch.cuda.empty_cache()


def prefill_cases(shapes):
    for n_rows, context in shapes:
        q = noise(1, HEADS, n_rows, DIM)
        k, v = noise(1, KV_HEADS, context, DIM), noise(1, KV_HEADS, context, DIM)
        triangle = n_rows * context - n_rows * (n_rows - 1) / 2  # pairs of a row and a token
        repeats = 3 if n_rows > 32768 else 10

        def attend(keys, values, **how):
            def run():
                F.scaled_dot_product_attention(q, keys, values, **how)
            run()
            torch.cuda.synchronize()
            return event_seconds(run, repeats)

        def repeated(**how):
            return attend(k.repeat_interleave(GROUP, 1), v.repeat_interleave(GROUP, 1), **how)

        if n_rows == context:
            pairs = {"enable_gqa": triangle, "repeated": triangle}
            forms = {"enable_gqa": lambda: attend(k, v, is_causal=True, enable_gqa=True),
                     "repeated": lambda: repeated(is_causal=True)}
        else:
            from torch.nn.attention.bias import causal_lower_right
            mask = causal_lower_right(n_rows, context)
            pairs = {"enable_gqa": triangle, "repeated": triangle, "rectangle": n_rows * context}
            forms = {"enable_gqa": lambda: attend(k, v, attn_mask=mask, enable_gqa=True),
                     "repeated": lambda: repeated(attn_mask=mask)}
        for backend in BACKENDS:
            case = {"kind": "prefill", "backend": backend, "rows": n_rows, "context": context}
            if backend == "cudnn" and n_rows != context:
                forms = {"rectangle": repeated}
            best, reasons = fastest(backend, forms)
            if best is not None:
                flops = 4 * pairs[best[0]] * HEADS * DIM
                case |= {"form": best[0], "ms": 1e3 * best[1], "tflop_s": flops / best[1] / 1e12}
            yield case | ({"not_run": reasons} if reasons else {})
        del q, k, v
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description="PyTorch's attention on this card, as JSON")
    parser.add_argument("--read-gb-s", type=float, default=0, help="measured read bandwidth")
    parser.add_argument("--quick", action="store_true", help="the smallest shapes only")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch finds no card")
        return
    torch.manual_seed(0)
    with torch.no_grad():
        read = args.read_gb_s or read_bandwidth()
        cases = list(decode_cases(read, DECODE[:1] if args.quick else DECODE))
        cases += prefill_cases(PREFILL[:1] if args.quick else PREFILL)
    print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda,
                      "cudnn": torch.backends.cudnn.version(),
                      "card": torch.cuda.get_device_name(), "read_gb_s": read, "cases": cases}))


if __name__ == "__main__":
    main()
