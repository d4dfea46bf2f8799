import sys, time, statistics
ROOT="."; sys.path[:0]=[ROOT, ROOT+"/examples"]
import numpy as np, rlx_ort
from rlx_ort import CompileOptions, DecodeLoop, Device, GraphDevices
from tiny_llama import Sizes, _decoder, rotation
L=int(sys.argv[1]) if len(sys.argv)>1 else 9
W=int(sys.argv[2]) if len(sys.argv)>2 else 64
sizes=Sizes(320, W, L, 4, 2, 2*W, 128); rng=np.random.default_rng(0)
shapes={"table": (sizes.vocabulary, sizes.width), "head": (sizes.width, sizes.vocabulary)}
for l in range(L):
    shapes |= {f"{l}.query": (sizes.width, sizes.width), f"{l}.key": (sizes.width, sizes.kv_width), f"{l}.value": (sizes.width, sizes.kv_width), f"{l}.out": (sizes.width, sizes.width), f"{l}.up_gate": (sizes.width, 2 * sizes.inner), f"{l}.down": (sizes.inner, sizes.width)}
w={n: (rng.standard_normal(s)*s[0]**-.5).astype(np.float32) for n,s in shapes.items()}
for n in (*[f"{l}.norm{p}" for l in range(L) for p in (1, 2)], "norm"): w[n] = rng.normal(1, 0.1, sizes.width).astype(np.float32)
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
g.set_outputs([logits, *cache], ["logits", *(f"present.{l}.{p}" for l in range(L) for p in ("key", "value"))])
names=[n.name for n in g.nodes]; mid=[n.name for n in g.nodes if "groupedquery" in n.name][L//2]; end=[n for n in g.nodes if not n.op.is_leaf][-1].name
plan={"schema":1,"sizes":{},"stages":[{"device":"cpu","last":mid},{"device":sys.argv[3] if len(sys.argv)>3 else "cpu","last":end}],"budgets":{}}
prompt=np.random.default_rng(7).integers(0, sizes.vocabulary, (1, 16))
def decode(options, device=None, prof=False):
    r=GraphDevices(g, options=options); c=r.compile(device) if device else r.compile_fastest(); loop=DecodeLoop(c, max_length=128); best=[]
    for _ in range(8):
        loop.reset(); toks=[]; ts=[]; t=time.perf_counter()
        for tok in loop.generate(prompt, max_new_tokens=100):
            now=time.perf_counter(); ts.append((now-t)*1e3); t=now; toks.append(int(np.asarray(tok).reshape(-1)[0]))
        best.append(statistics.median(ts[4:]))
    print("in_place", loop.in_place)
    if prof:
        import cProfile,pstats; loop.reset(); p=cProfile.Profile(); p.enable(); list(loop.generate(prompt,max_new_tokens=100)); p.disable(); pstats.Stats(p).sort_stats("tottime").print_stats(18)
    loop.close(); r.close(); return min(best), toks
one,t1=decode(CompileOptions(), "cpu"); two,t2=decode(CompileOptions(split=plan), prof=len(sys.argv)>4); print(one,two,t1==t2)
from rlx_ort.execution.staged import stage_graphs, cuts_of
from rlx_ort.options.split_plan import SplitPlan
try:
    sp=CompileOptions(split=plan).split
    gs=stage_graphs(g, cuts_of(g, sp if not isinstance(sp,dict) else SplitPlan.of(sp)))
    print([n for n in gs[1].input_types if "past" not in n])
except Exception as e: print(repr(e))
