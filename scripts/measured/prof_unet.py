"""Where a row of peers takes its time: kernels of torch.compile and of ours, by CUPTI. prof_unet.py NAME BATCH"""
import sys, time, argparse, tempfile
from pathlib import Path
sys.path[:0] = [str(Path.cwd() / "scripts"), str(Path.cwd())]
name, batch = sys.argv[1], int(sys.argv[2])
import numpy as np, torch, peers, user_models
from torch.profiler import profile, ProfilerActivity
torch.backends.cudnn.benchmark = False
built = peers.architecture(name); seq = peers.TABLES["models"][name].get("seq", 1)
folder = Path(tempfile.mkdtemp())
model = user_models.export(built, "dynamo", None, peers.arrays(built, 2, seq)); (folder / "model.onnx").write_bytes(model.SerializeToString())
feeds = peers.arrays(built, batch, seq)
o = argparse.Namespace(device="cuda", precision="f16", tolerance=None, budget=25.0, exporter="dynamo")
def show(title, run, n=20):
    for _ in range(30): run()
    t = time.perf_counter()
    for _ in range(50): run()
    ms = (time.perf_counter() - t) / 50 * 1e3
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
        for _ in range(n): run()
    rows = {}
    for e in p.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            at = rows.setdefault(e.name[:110], [0, 0.0]); at[0] += 1; at[1] += e.device_time if hasattr(e, "device_time") else e.cuda_time
    print(f"== {title}: {ms:.3f} ms, on the device {sum(v[1] for v in rows.values()) / n / 1e3:.3f} ms", flush=True)
    for k, (c, us) in sorted(rows.items(), key=lambda kv: -kv[1][1])[:22]: print(f"{us / n / 1e3:8.4f} ms {c / n:6.1f} x {k}")
show("torch.compile", peers.way("torch.compile", name, folder, feeds, o))
import rlx_ort
import logging; logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(message)s")
runner = rlx_ort.load(str(folder / "model.onnx"), options=rlx_ort.CompileOptions(precision="f16"))
out = runner.tune(feeds, "cuda", tolerance=None, budget_s=25)
print(out.variant, out.speedup, out.error, out.usual_ns, out.run_ns, flush=True)
for t in out.trials: print("  ", t.variant, t.run_ns, t.ratio, t.error, t.note, flush=True)
for _ in range(12):
    for _ in range(40): runner.run("cuda", feeds)
    time.sleep(0.7)
print(runner.compile("cuda").device_graph_report(), flush=True)
show("tuned", lambda: runner.run("cuda", feeds))
