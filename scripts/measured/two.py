"""Two cards: two.py OUT MINILM.onnx BERT.onnx [LAYERS of the Llama, and nothing else]"""
import gc, json, statistics, sys, threading, time
from pathlib import Path
ROOT = Path.cwd(); sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
import numpy as np, rlx_ort
from rlx_ort import CompileOptions, DecodeLoop, Device, GraphDevices
from rlx_ort.made_up import random_inputs
from rlx_ort.providers.registry import provider_of
out = open(sys.argv[1], "w")
def put(**r): out.write(json.dumps(r) + "\n"); out.flush(); print(json.dumps(r)[:400], flush=True)
def ids(feeds): return {n: np.ones_like(a) if a.dtype.kind == "i" else a for n, a in feeds.items()}
def both_and_pipelined():
    # recordings on both at once
    with rlx_ort.load(sys.argv[2]) as r:
        feeds = ids(random_inputs(r.graph.input_types, {"batch": 1, "seq": 128})[0])
        want = [np.asarray(a) for a in r.run("cpu", feeds)]
        for d in ("cuda:0", "cuda:1"):
            for _ in range(300): r.run(d, feeds)
        count, wrong, errors, end = [0], [0], [], time.time() + 6
        def work(d):
            while time.time() < end:
                try: got = r.run(d, feeds)
                except Exception as e: errors.append(repr(e)[:200]); return
                count[0] += 1
                wrong[0] += any(np.abs(np.asarray(a) - b).max() > 1e-3 * np.abs(b).max() for a, b in zip(got, want))
        ts = [threading.Thread(target=work, args=(d,)) for d in ("cuda:0", "cuda:1") * 2]
        [t.start() for t in ts]; [t.join() for t in ts]
        put(part="recordings on both", runs=count[0], wrong=wrong[0], errors=errors,
            recorded={d: str(r.device_graph_report(d))[:160] if hasattr(r, "device_graph_report") else "" for d in ("cuda:0", "cuda:1")})
    # pipelined
    base = rlx_ort.load(sys.argv[3]); graph = base.graph; feeds = ids(random_inputs(graph.input_types, {"batch": 16, "seq": 128})[0])
    op = lambda n: getattr(n.op, "op_type", type(n.op).__name__)
    names = [n.name for n in graph.nodes if op(n) == "LayerNormalization"]; end = [n for n in graph.nodes if not n.op.is_leaf][-1].name
    for at in (len(names) // 2, len(names) // 2 - 1, len(names) // 2 + 1):
        plan = {"schema": 1, "sizes": {}, "stages": [{"device": "cuda:0", "last": names[at]}, {"device": "cuda:1", "last": end}], "budgets": {}}
        r = GraphDevices(graph, options=CompileOptions(split=plan), weights=base.weights); c = r.compile_fastest()
        for _ in range(6): c.run(feeds)
        ratios = []
        for _ in range(7):
            a = time.perf_counter()
            for _ in range(25): c.run(feeds)
            b = time.perf_counter(); list(c.run_pipelined([feeds] * 25)); d = time.perf_counter(); ratios.append((b - a) / (d - b))
        put(part="pipelined", at=at, one_ms=round((b - a) / 25e-3, 2), ratio=round(statistics.median(ratios), 3), least=round(min(ratios), 3), most=round(max(ratios), 3))
        r.close(); del r, c; gc.collect()
    base.close()
if len(sys.argv) < 5: both_and_pipelined()
# a Llama of random weights, each card under a budget for 0.6 of it
from tiny_llama import Sizes, _decoder, rotation
from concurrent.futures import ThreadPoolExecutor
sizes = Sizes(32000, 4096, int(sys.argv[4]) if len(sys.argv) > 4 else 9, 32, 8, 9216, 128); rng = np.random.default_rng(0)
shapes = {"table": (sizes.vocabulary, sizes.width), "head": (sizes.width, sizes.vocabulary)}
for l in range(sizes.layers):
    shapes |= {f"{l}.query": (sizes.width, sizes.width), f"{l}.key": (sizes.width, sizes.kv_width), f"{l}.value": (sizes.width, sizes.kv_width), f"{l}.out": (sizes.width, sizes.width), f"{l}.up_gate": (sizes.width, 2 * sizes.inner), f"{l}.down": (sizes.inner, sizes.width)}
def mk(a):
    (n, s), seed = a; x = np.random.default_rng(seed).standard_normal(s, dtype=np.float32); x *= np.float32(1 if n == "table" else s[0] ** -0.5); return n, x
with ThreadPoolExecutor(16) as ex: w = dict(ex.map(mk, zip(shapes.items(), range(1000))))
for n in (*[f"{l}.norm{p}" for l in range(sizes.layers) for p in (1, 2)], "norm"): w[n] = rng.normal(1, 0.1, sizes.width).astype(np.float32)
g = rlx_ort.Graph("growing"); i = g.input("input_ids", ["batch", "seq"], "i64")
mask = g.input("attention_mask", ["batch", "total"], "i64"); kept = g.reshape(mask.cast("f32"), ["batch", "total", 1])
place = g.gather(g.input("position_ids", ["batch", "seq"], "i64"), np.array(0), axis=0)
tables = [g.gather(g.constant(t.astype(np.float32)), place, axis=0) for t in rotation(sizes.longest, sizes.head)]
shape = ["batch", "past", sizes.kv_width]
def attend(l, q, k, v):
    k = g.concat([g.input(f"past_key_values.{l}.key", shape), k], axis=1); v = g.concat([g.input(f"past_key_values.{l}.value", shape), v], axis=1)
    k, v = (g.reshape(x, ["batch", "total", sizes.kv_width]) for x in (k, v))
    return g.gqa(q, k * kept, v, sizes.heads, sizes.kv_heads, sizes.head, "causal"), k, v
logits, cache = _decoder(g, sizes, w, i, tables, attend)
g.set_outputs([logits, *cache], ["logits", *(f"present.{l}.{p}" for l in range(sizes.layers) for p in ("key", "value"))])
nb = sum(a.nbytes for a in w.values()); del w; gc.collect()
feeds, _ = random_inputs(g.input_types, {"batch": 1, "seq": 1, "past": sizes.longest - 1, "total": sizes.longest})
from rlx_ort.selection.memory import memory_need
need = memory_need(g, "cuda:0", CompileOptions(), {"batch": 1, "seq": 1, "past": sizes.longest - 1, "total": sizes.longest}).total
budgets = {"cuda:0": int(0.6 * need), "cuda:1": int(0.6 * need)}  # 0.6 of the weights do not hold it, with 655 MB for each card's libraries
r = GraphDevices(g); plan = r.plan(feeds, budgets); put(part="llama", weights=nb, need=need, streams=plan.streams, budgets=budgets, stages=[(s.get("device"), s.get("last")) for s in plan.document()["stages"]])
prompt = np.random.default_rng(7).integers(0, sizes.vocabulary, (1, 16))
def decode(options, device=None):
    r = GraphDevices(g, options=options); c = r.compile(device) if device else r.compile_fastest(); loop = DecodeLoop(c, max_length=sizes.longest); toks, ts, t = [], [], time.perf_counter()
    for tok in loop.generate(prompt, max_new_tokens=30):
        now = time.perf_counter(); ts.append((now - t) * 1e3); t = now; toks.append(int(np.asarray(tok).reshape(-1)[0]))
    m = {d: (provider_of(Device(d)).memory(Device(d)) or type("x", (), {"nbytes": 0})).nbytes for d in ("cuda:0", "cuda:1")}
    loop.close(); r.close(); gc.collect(); return round(statistics.median(ts[4:]), 3), toks, m
for _ in range(2):
    one, t1, _m = decode(CompileOptions(), "cuda:0"); two, t2, m = decode(CompileOptions(split=plan))
    put(part="llama", layers=sizes.layers, one_ms=one, two_ms=two, ratio=round(one / two, 3), same=t1 == t2, memory=m)
