"""Skeletons to models with random weights. fill.py SKELDIR OUTDIR names..."""
import sys, json, onnx, numpy as np
from pathlib import Path
def fill(src, dst):
    mo=onnx.load(str(src)); spec=json.loads({p.key:p.value for p in mo.metadata_props}["skeleton"]); rng=np.random.default_rng(0)
    for t in mo.graph.initializer:
        if t.name in spec:
            dims,std,mean=spec[t.name]; a=rng.standard_normal(int(np.prod(dims)),dtype=np.float32); a*=std; a+=mean; t.raw_data=a.tobytes()
    onnx.save(mo,str(dst))
if __name__=="__main__":
    out=Path(sys.argv[2]); out.mkdir(exist_ok=True,parents=True)
    for n in sys.argv[3:]:
        if not (out/f"{n}.onnx").exists(): fill(Path(sys.argv[1])/f"{n}.skel",out/f"{n}.onnx")
