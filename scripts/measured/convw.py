import subprocess, sys, json
code='''
import sys, json, numpy as np, onnxruntime as o
from onnx import helper as h
cfg=json.loads(sys.argv[1]); x,w=cfg["x"],cfg["w"]; t=10 if cfg.get("half") else 1; dt=np.float16 if t==10 else np.float32
n=h.make_node(cfg.get("op","Conv"),["x","w"],["y"],group=cfg.get("group",1))
g=h.make_graph([n],"g",[h.make_tensor_value_info("x",t,[None]*len(x)),h.make_tensor_value_info("w",t,w)],[h.make_tensor_value_info("y",t,None)])
m=h.make_model(g,opset_imports=[h.make_opsetid("",20)],ir_version=9).SerializeToString()
if cfg["who"]=="plain":
    so=o.SessionOptions(); so.log_severity_level=4
    s=o.InferenceSession(m,so,providers=["CUDAExecutionProvider","CPUExecutionProvider"]); run=lambda f: s.run(None,f)
else:
    import os; sys.path.insert(0,os.getcwd()); import rlx_ort; r=rlx_ort.load(m); run=lambda f: r.run("cuda",f)
for shape in ([cfg["first"]] if cfg.get("first") else [])+[x,x]:
    try: print("ok",[list(a.shape) for a in run({"x":np.ones(shape,dt),"w":np.ones(w,dt)})],flush=True)
    except Exception as e: print(type(e).__name__,str(e)[-160:].replace("\\n"," "),flush=True)
'''
cases=[dict(x=[2,4,3],w=[4,1,4],group=4),dict(x=[2,4,1],w=[4,1,4],group=4),dict(x=[2,4,3],w=[4,4,4]),dict(x=[2,4,1],w=[4,4,4]),dict(x=[1,3,2,8],w=[4,3,3,3]),dict(x=[1,3,1,8],w=[4,3,3,3]),dict(x=[2,4,3],w=[4,1,4],group=4,half=1),dict(x=[2,4,3],w=[4,4,4],first=[2,4,9]),dict(x=[2,4,1],w=[4,4,4],first=[2,4,9]),dict(x=[0,4,9],w=[4,4,4]),dict(x=[2,4,0],w=[4,4,4])]
for who in ("plain","ours"):
    for c in cases:
        p=subprocess.run([sys.executable,"-c",code,json.dumps(dict(c,who=who))],capture_output=True,text=True,timeout=60)
        print(who,c,"rc",p.returncode,"|",p.stdout.strip().replace("\n"," / ")[-330:],"|",(p.stderr.strip().splitlines() or [""])[-1][-120:] if p.returncode else "",flush=True)
