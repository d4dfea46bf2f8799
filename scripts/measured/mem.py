"""Memory of sessions with fixed widths. mem.py OUT NAME JSON-of-provider-options [config JSON]"""
import sys, json, time
from pathlib import Path
sys.path.insert(0,str(Path.cwd()))
import numpy as np, rlx_ort
from rlx_ort import CompileOptions, Device
from rlx_ort.providers.registry import provider_of
out,name,po=sys.argv[1],sys.argv[2],json.loads(sys.argv[3]); dev=sys.argv[4] if len(sys.argv)>4 else "cuda"
limit=int(sys.argv[5]) if len(sys.argv)>5 else 0
d=Device(dev); rng=np.random.default_rng(1)
def used():
    r=provider_of(d).memory(d); return 0 if r is None else r.nbytes>>20
row={"name":name,"used":[used()],"us":[],"replay":[]}
keep=[]
for w in (400,64,96,128,160,200,240,280,320):
    o=CompileOptions(dims={"batch":1,"width":w},provider_options=po,**({"device_memory_limit_bytes":limit<<20} if limit else {}))
    r=rlx_ort.load("ocr.onnx",options=o); f={"x":rng.standard_normal((1,3,32,w),dtype=np.float32)}
    try:
        t=time.perf_counter()
        for _ in range(12): r.run(dev,f)
        row.setdefault("open_s",[]).append(round(time.perf_counter()-t,2))
        ts=[]
        for _ in range(30):
            t=time.perf_counter_ns(); r.run(dev,f); ts.append(time.perf_counter_ns()-t)
        row["us"].append(round(sorted(ts)[15]/1e3)); row["used"].append(used())
    except Exception as e: row["error"]=repr(e)[:300]; break
    keep.append(r)
row["each"]=[b-a for a,b in zip(row["used"],row["used"][1:])]
open(out,"a").write(json.dumps(row)+"\n"); print(json.dumps(row),flush=True)
