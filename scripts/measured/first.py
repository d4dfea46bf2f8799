"""Where the first run of a width goes."""
import sys, json, time, cProfile, pstats, io
from pathlib import Path
sys.path.insert(0,str(Path.cwd()))
import numpy as np, rlx_ort
dev=sys.argv[1]; rng=np.random.default_rng(1)
r=rlx_ort.load("ocr.onnx"); F={w:{"x":rng.standard_normal((1,3,32,w),dtype=np.float32)} for w in range(64,500,8)}
for w in (64,72,64,72): r.run(dev,F[w])
import rlx_ort.execution.engine as e
T={}
def wrap(o,n):
    f=getattr(o,n)
    def g(*a,**k):
        t=time.perf_counter(); x=f(*a,**k); T.setdefault(n,[]).append((time.perf_counter()-t)*1e3); return x
    setattr(o,n,g)
wrap(e.EngineSlot,"check_sizes"); wrap(e.EngineSlot,"_bound_nodes")
a=[]
ws=[int(w) for w in np.random.default_rng(3).permutation(list(F)[2:])]
for w in ws[:26]:
    t=time.perf_counter(); r.run(dev,F[w]); a.append((time.perf_counter()-t)*1e3)
print("first",np.median(a),{k:(len(v),round(float(np.mean(v)),2)) for k,v in T.items()})
p=cProfile.Profile(); p.enable()
for w in ws[26:50]: r.run(dev,F[w])
p.disable(); s=io.StringIO(); pstats.Stats(p,stream=s).sort_stats("cumtime").print_stats(22); print(s.getvalue()[:3800])
