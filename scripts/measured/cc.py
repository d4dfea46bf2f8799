"""Corpus times and predictions. cc.py SHARD OF OUT [seconds]"""
import json, os, sys, time, gc, tempfile, statistics, traceback, subprocess
from pathlib import Path
ROOT = Path.cwd()
sys.path[:0] = [str(ROOT), str(ROOT/"tests"/"helpers"), str(ROOT/"scripts")]
shard, of, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
end = time.monotonic() + float(sys.argv[4] if len(sys.argv) > 4 else 300)
from model_corpus import corpus
import rlx_ort
from rlx_ort import environment
from rlx_ort.calibration import store
from rlx_ort.device import Device
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.selection.predict import calibrate
from rlx_ort.providers.registry import availability, available_devices
import model_runs as mr
out.mkdir(parents=True, exist_ok=True)
log = open(out/f"cc-{shard}.jsonl", "w")
def put(**row):
    log.write(json.dumps(row)+"\n"); log.flush()
cores = len(os.sched_getaffinity(0))
put(kind="machine", cores=cores, devices=[d.label for d in available_devices()], cuda=str(availability(Device("cuda"))), cpu=str(availability(Device("cpu"))))
devices = [Device("cpu"), Device("cuda"), Device("webgpu")]
folders = {state: tempfile.mkdtemp() for state in ("none", "quick", "full")}
for state in ("quick", "full"):
    with environment.override({"RLX_CACHE_DIR": folders[state]}):
        store.forget()
        for d in devices:
            t = time.perf_counter()
            try:
                p = calibrate(d, quick=state == "quick")
                put(kind="calibration", state=state, device=d.label, s=time.perf_counter()-t, rows=[[r.kernel, list(r.size), r.ns, r.dtype] for r in p.rows])
            except Exception as e:
                put(kind="calibration", state=state, device=d.label, error=repr(e)[:300])
import zlib
hash_of = lambda n: zlib.crc32(n.encode())
models = sorted(corpus(), key=lambda m: hash_of(m.name)) if of == 1 else corpus()[shard::of]
import zlib
def hash_of(n): return zlib.crc32(n.encode())
def predictions(content, feeds):
    got = {}
    for state, folder in folders.items():
        with environment.override({"RLX_CACHE_DIR": folder}):
            store.forget()
            with rlx_ort.load(content) as runner:
                rows = runner.rank(feeds)
                got[state] = {r.device.label: [r.predicted_ns, getattr(r, "blocker", None) and str(r.blocker)[:80]] for r in rows}
                got[state]["chosen"] = runner.fastest(feeds).label
    return got
for model in models:
    if time.monotonic() > end: put(kind="end"); break
    content = model.model()
    for case, batch in mr.TIMED.items():
        feeds = model.feeds(model.cases[case])
        row = {"kind": "case", "model": model.name, "batch": batch, "sizes": dict(model.cases[case])}
        try:
            row["predicted"] = predictions(content, feeds)
        except Exception as e:
            row["predict_error"] = traceback.format_exc()[-400:]
        row["ns"] = {}
        for d in devices:
            if d.label == "webgpu" and "webgpu" not in {p.get("chosen") for p in row.get("predicted", {}).values()}: continue
            try:
                with rlx_ort.load(content) as runner:
                    compiled = runner.compile(d)
                    run = lambda: runner.run(d, feeds)
                    took = mr._settled(run, compiled)
                    n = max(1, min(50, int(0.02/took)))
                    blocks = []
                    for _ in range(5 if took < 0.1 else 2):
                        t = time.perf_counter()
                        for _ in range(n): run()
                        blocks.append((time.perf_counter()-t)/n*1e9)
                    row["ns"][d.label] = min(blocks); row.setdefault("median", {})[d.label] = statistics.median(blocks)
                    del compiled, run
            except Exception as e:
                row.setdefault("error", {})[d.label] = repr(e)[:150]
            gc.collect()
        put(**row)
put(kind="done")
