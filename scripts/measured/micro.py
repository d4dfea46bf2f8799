"""Where the time of a batch goes. micro.py OUT MODEL DIMS"""
import json, sys, time, statistics
from pathlib import Path
sys.path[:0] = [str(Path.cwd())]
import numpy as np, onnxruntime as o, rlx_ort
out = open(sys.argv[1], "a"); path = sys.argv[2]; dims = {k: int(v) for k, v in (e.split("=") for e in sys.argv[3].split(","))}
so = o.SessionOptions(); so.log_severity_level = 3
s = o.InferenceSession(path, so, providers=[("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"])
def feeds(b):
    return {i.name: (np.random.rand(b, *[d if isinstance(d, int) else dims.get(d, 1) for d in i.shape[1:]]).astype(np.float32) if i.type == "tensor(float)" else np.ones((b, *[d if isinstance(d, int) else dims.get(d, 1) for d in i.shape[1:]]), np.int64)) for i in s.get_inputs()}
def timed(f, seconds=0.8):
    for _ in range(3): f()
    t = time.perf_counter(); n = 0
    while time.perf_counter() - t < seconds: f(); n += 1
    return round((time.perf_counter() - t) / n * 1e3, 3)
with rlx_ort.load(path) as r:
    for b in (16, 32, 64):
        f = feeds(b); row = {"model": Path(path).stem, "rows": b}
        row["plain"] = timed(lambda: s.run(None, f))
        io = s.io_binding()
        for n, a in f.items(): io.bind_cpu_input(n, a)
        for v in s.get_outputs(): io.bind_output(v.name, "cuda", 0)
        row["no_out"] = timed(lambda: s.run_with_iobinding(io))
        io = s.io_binding(); kept = []
        for n, a in f.items():
            v = o.OrtValue.ortvalue_from_numpy(a, "cuda", 0); kept.append(v); io.bind_ortvalue_input(n, v)
        for v in s.get_outputs(): io.bind_output(v.name, "cuda", 0)
        row["compute"] = timed(lambda: s.run_with_iobinding(io))
        end = time.time() + 3
        while time.time() < end: r.run("cuda", f)
        row["ours"] = timed(lambda: r.run("cuda", f))
        row["rows_s"] = {k: round(b / row[k] * 1e3) for k in ("plain", "no_out", "compute", "ours")}
        out.write(json.dumps(row) + "\n"); out.flush(); print(json.dumps(row), flush=True)
