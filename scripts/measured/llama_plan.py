import sys, time
from pathlib import Path
ROOT = Path.cwd(); sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
import numpy as np, rlx_ort
from rlx_ort import CompileOptions, Device, GraphDevices
from rlx_ort.made_up import random_inputs
from tiny_llama import Sizes, _decoder, rotation
L=int(sys.argv[1]) if len(sys.argv)>1 else 9
frac=float(sys.argv[2]) if len(sys.argv)>2 else 0.6
sizes = Sizes(32000, 4096, L, 32, 8, 9216, 128)
shapes = {"table": (sizes.vocabulary, sizes.width), "head": (sizes.width, sizes.vocabulary)}
for l in range(sizes.layers):
    shapes |= {f"{l}.query": (sizes.width, sizes.width), f"{l}.key": (sizes.width, sizes.kv_width), f"{l}.value": (sizes.width, sizes.kv_width), f"{l}.out": (sizes.width, sizes.width), f"{l}.up_gate": (sizes.width, 2 * sizes.inner), f"{l}.down": (sizes.inner, sizes.width)}
w = {n: np.zeros(s, np.float32) for n, s in shapes.items()}
for n in (*[f"{l}.norm{p}" for l in range(sizes.layers) for p in (1, 2)], "norm"): w[n] = np.zeros(sizes.width,np.float32)
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
nb = sum(a.nbytes for a in w.values()); del w
feeds, _ = random_inputs(g.input_types, {"batch": 1, "seq": 1, "past": sizes.longest - 1, "total": sizes.longest})
from rlx_ort.selection import splitting as sp
budgets = {Device("cuda:0"): int(frac * nb), Device("cuda:1"): int(frac * nb)}
dims={"batch": 1, "seq": 1, "past": sizes.longest - 1, "total": sizes.longest}
t=time.time()
from rlx_ort.selection.memory import memory_need
n=memory_need(g, Device("cuda:0"), CompileOptions(), dims)
print({k:getattr(n,k) for k in "weights packed inputs cache activations arena work_space opening runtime process correction".split()})
tb = sp._Table(g, list(budgets), CompileOptions(), dims)
print("works", [str(d) for d in tb.works], "places", len(tb.places), time.time()-t)
loose = {d: b*1.1 for d,b in budgets.items()}
for order in tb.orders():
    e=tb.fastest(order, loose)
    print([d.display for d in order], e and (e[0], [(d.display, g.nodes[end-1].name) for d,end in e[1]]))
plan = sp.plan_split(g, budgets, CompileOptions(), dims)
print(plan.streams, plan.run_ns, [(str(s.device), s.last if hasattr(s,'last') else '', s.memory_bytes/1e9) for s in plan.stages], nb/1e9, time.time()-t)
