"""Plans against cuts by hand. splits.py OUT llama SECONDS | cut MODEL DIMS SHARE DEV1 SECONDS | pipe MODEL DIMS SECONDS"""
import sys, json, time, statistics, gc, os
from pathlib import Path
ROOT=Path.cwd(); sys.path[:0]=[str(ROOT),str(ROOT/"examples")]
import numpy as np
import rlx_ort
from rlx_ort import CompileOptions, Device, GraphDevices, DecodeLoop
from rlx_ort.options.split_plan import SplitPlan
from rlx_ort.selection.predict import calibrate, dims_of
from rlx_ort.selection.memory import memory_need
from rlx_ort.providers.registry import provider_of
from rlx_ort.made_up import random_inputs
out=open(sys.argv[1],"w"); kind=sys.argv[2]
def put(**r): out.write(json.dumps(r)+"\n"); out.flush(); print(json.dumps(r)[:300],flush=True)
GPU=Device(os.environ.get("SPLIT_DEVICE","cuda")); other=os.environ.get("SPLIT_DEVICE","cuda")
def used(): 
    r=provider_of(GPU).memory(GPU); return 0 if r is None else r.nbytes
for d in (Device.CPU,GPU):
    if "nocal" not in sys.argv: calibrate(d,quick=True)
leaf=lambda n: n.op.is_leaf
def single(graph):
    """Places and names of the nodes that end a block: norms, and activations of a sum."""
    op=lambda n: getattr(n.op,"op_type",type(n.op).__name__)
    def ends(n):
        if op(n) in ("LayerNormalization","MaxPool"): return True
        return op(n)=="Relu" and n.inputs and op(graph.nodes[n.inputs[0].node])=="Add"
    return [(i,n.name) for i,n in enumerate(graph.nodes) if ends(n)]
def plan_of(stages, budgets): return {"schema":1,"sizes":globals().get("dims",{}),"stages":[{"device":d,"last":n} for d,n in stages],"budgets":budgets}
def median_ms(run,seconds):
    for _ in range(2): run()
    ts=[]; end=time.perf_counter()+seconds
    while len(ts)<5 or (time.perf_counter()<end and len(ts)<40):
        t=time.perf_counter(); run(); ts.append((time.perf_counter()-t)*1e3)
    return round(statistics.median(ts),3), round(min(ts),3)
begun=time.monotonic()
if kind=="llama":
    limit=float(sys.argv[3])
    from tiny_llama import Sizes, _decoder, _cache_names, rotation
    def build_growing(sizes,weights):
        """A cache that grows, as Optimum exports it; no mask."""
        g=rlx_ort.Graph("growing")
        ids=g.input("input_ids",["batch","seq"],"i64")
        mask=g.input("attention_mask",["batch","total"],"i64"); kept=g.reshape(mask.cast("f32"),["batch","total",1])
        place=g.gather(g.input("position_ids",["batch","seq"],"i64"),np.array(0),axis=0)
        tables=[g.gather(g.constant(t.astype(np.float32)),place,axis=0) for t in rotation(sizes.longest,sizes.head)]
        shape=["batch","past",sizes.kv_width]
        def attend(l,q,k,v):
            k=g.concat([g.input(f"past_key_values.{l}.key",shape),k],axis=1)
            v=g.concat([g.input(f"past_key_values.{l}.value",shape),v],axis=1)
            k,v=(g.reshape(x,["batch","total",sizes.kv_width]) for x in (k,v))
            return g.gqa(q,k*kept,v,sizes.heads,sizes.kv_heads,sizes.head,"causal"),k,v
        logits,cache=_decoder(g,sizes,weights,ids,tables,attend)
        g.set_outputs([logits,*cache],["logits",*(f"present.{l}.{p}" for l in range(sizes.layers) for p in ("key","value"))])
        return g
    small="small" in sys.argv
    sizes=Sizes(2000,256,9,8,2,512,128) if small else Sizes(32000,4096,9,32,8,9216,128)
    rng=np.random.default_rng(0); w={}
    shapes={"table":(sizes.vocabulary,sizes.width),"head":(sizes.width,sizes.vocabulary)}
    for l in range(sizes.layers):
        shapes|={f"{l}.query":(sizes.width,sizes.width),f"{l}.key":(sizes.width,sizes.kv_width),f"{l}.value":(sizes.width,sizes.kv_width),f"{l}.out":(sizes.width,sizes.width),f"{l}.up_gate":(sizes.width,2*sizes.inner),f"{l}.down":(sizes.inner,sizes.width)}
    from concurrent.futures import ThreadPoolExecutor
    def mk(a):
        (n,s),seed=a; x=np.random.default_rng(seed).standard_normal(s,dtype=np.float32); x*= np.float32(1 if n=="table" else s[0]**-0.5); return n,x
    with ThreadPoolExecutor(8) as ex: w=dict(ex.map(mk,zip(shapes.items(),range(1000))))
    for n in (*[f"{l}.norm{p}" for l in range(sizes.layers) for p in (1,2)],"norm"): w[n]=rng.normal(1,0.1,sizes.width).astype(np.float32)
    graph=build_growing(sizes,w); nb=sum(a.nbytes for a in w.values()); del w; gc.collect()
    put(weights_bytes=nb, made_s=round(time.monotonic()-begun,1))
    budget="24MB" if small else str(4<<30)
    dims={"batch":1,"seq":1,"past":sizes.longest-1,"total":sizes.longest}
    feeds,_=random_inputs(graph.input_types,dims)
    budgets={other: 24<<20 if small else 4<<30, "cpu": 100<<30}
    if small: budgets[other]=60<<20
    runner=GraphDevices(graph); plan=runner.plan(feeds,budgets)
    put(plan=plan.document(), planned_s=round(time.monotonic()-begun,1))
    prompt=np.random.default_rng(7).integers(0,sizes.vocabulary,(1,16)); N=6
    def decode(options, device=None):
        r=GraphDevices(graph,options=options); base=used()
        c=r.compile(device) if device else r.compile_fastest()
        loop=DecodeLoop(c,max_length=sizes.longest)
        toks=[];ts=[];t=time.perf_counter()
        for tok in loop.generate(prompt,max_new_tokens=14):
            now=time.perf_counter(); ts.append((now-t)*1e3); t=now; toks.append(int(np.asarray(tok).reshape(-1)[0]))
        m=used(); loop.close(); r.close(); del r,c,loop; gc.collect()
        return round(statistics.median(ts[3:]),2), round(min(ts[3:]),2), toks, m
    ms,least,toks,m=decode(CompileOptions(split=plan)); put(which="planned",ms=ms,least=least,used=m,budget=budgets[other],tokens=toks)
    ms,least,ctoks,_=decode(CompileOptions(),"cpu"); put(which="cpu",ms=ms,least=least,same=ctoks==toks)
    ids={n.output_names[0]:n.id for n in graph.nodes if leaf(n)}
    nonleaf=[n for n in graph.nodes if not leaf(n)]
    bound=[]
    for l in range(1,sizes.layers):
        pid=ids[f"{l}.norm1"]; at=next(i for i,n in enumerate(nonleaf) if any(r is not None and r.node==pid for r in n.inputs)); 
        # the first node that reads the layer's input: before its norm
        bound.append(nonleaf[at-1].name)
    end=nonleaf[-1].name; L=sizes.layers; done=0
    # contiguous runs of layers on the device, as many as fit
    cand=[]
    for k in (6,5,4,3):
        for a in (L-k,0,2,1,3):
            if 0<=a<=L-k and (a,k) not in cand: cand.append((a,k))
    for a,k in cand:
        if done>=10 or time.monotonic()-begun>limit: break
        st=[]
        if a>0: st.append(("cpu",bound[a-1]))
        if a+k<L: st+= [(other,bound[a+k-1]),("cpu",end)]
        else: st.append((other,end))
        try: ms,least,tk,m=decode(CompileOptions(split=plan_of(st,budgets)))
        except Exception as e: put(which="hand",first=a,layers=k,error=repr(e)[:160]); continue
        done+=1; put(which="hand",first=a,layers=k,ms=ms,least=least,same=tk==toks,used=m)
    ms,least,tk,m=decode(CompileOptions(split=plan)); put(which="planned again",ms=ms,least=least,used=m,same=tk==toks)
elif kind in ("cut","pipe"):
    path,dims=sys.argv[3],{k:int(v) for k,v in (e.split("=") for e in sys.argv[4].split(","))}
    base=rlx_ort.load(path); graph=base.graph; feeds,_=random_inputs(graph.input_types,dims)
    for n,a in feeds.items():
        if a.dtype.kind=="i": feeds[n]=np.ones_like(a)
    names=single(graph); put(candidates=len(names),nodes=len(graph.nodes))
    def runner(split=None,**o): return GraphDevices(graph,options=CompileOptions(split=split,**o) if split else CompileOptions(**o),weights=base.weights)
    end=[n for n in graph.nodes if not leaf(n)][-1].name
    if kind=="cut":
        share,limit=float(sys.argv[5]),float(sys.argv[6])
        need=memory_need(graph,GPU,None,dims)
        budgets={other:int(need.total*share),"cpu":100<<30}; put(need=need.total,budget=budgets[other])
        plan=base.plan(feeds,budgets); put(plan=plan.document())
        def one(split,device=None):
            r=runner(split); run=(lambda: r.run(device,feeds)) if device else (lambda: r(feeds))
            res=run(); m=median_ms(run,2.0); u=used(); r.close(); del r,run; gc.collect(); return m,res,u
        cpu,want,_=one(None,"cpu"); put(which="cpu",ms=cpu)
        def err(a): return float(max(np.abs(np.asarray(x)-np.asarray(y)).max()/max(np.abs(np.asarray(y)).max(),1e-9) for x,y in zip(a,want)))
        m,res,u=one(plan); put(which="planned",ms=m,error=err(res),used=u)
        done=0; positions=np.linspace(0.05,0.95,19)
        order=[]
        for p in positions:
            i=min(range(len(names)),key=lambda j: abs(names[j][0]/len(graph.nodes)-p)); order.append(names[i][1])
        order=list(dict.fromkeys(order)); cand=[]
        for j,n in enumerate(order): cand.append([("cpu",n),(other,end)]); 
        for j,n in reversed(list(enumerate(order))): cand.append([(other,n),("cpu",end)])
        # the largest that fit on either side first, then a middle part on the device
        ok=[]
        middle=[[("cpu",a),(other,b),("cpu",end)] for width in range(len(order)-1,3,-1) for k,a in enumerate(order[:4]) if k+width<len(order) for b in [order[k+width]]]
        for side in (cand[:len(order)],cand[len(order):],middle):
            fit=[]
            for st in side:
                try:
                    r=runner(plan_of(st,budgets)); r.compile_fastest(); r.close(); del r; gc.collect(); fit.append(st)
                except Exception as e: continue
                if len(fit)>=(5 if side is not middle else 12-len(ok)) or time.monotonic()-begun>limit*0.6: break
            ok+=fit
        put(fitting=len(ok))
        for st in ok:
            if time.monotonic()-begun>limit: break
            try: m,res,u=one(plan_of(st,budgets))
            except Exception as e: put(which="hand",stages=st,error=repr(e)[:160]); continue
            done+=1; put(which="hand",stages=st,ms=m,error=err(res))
        m,res,u=one(plan); put(which="planned again",ms=m,used=u,done=done)
        cpu,_,_=one(None,"cpu"); put(which="cpu again",ms=cpu)
    else:
        limit=float(sys.argv[5])
        def t(device):
            r=runner(); v=median_ms(lambda: r.run(device,feeds),1.0); r.close(); gc.collect(); return v
        tc,tg=t("cpu"),t(other); f=tg[0]/(tc[0]+tg[0]); put(cpu=tc,gpu=tg,share=f)
        near=sorted(names,key=lambda x: abs(x[0]/len(graph.nodes)-f))[:8]
        for i,n in near:
            if time.monotonic()-begun>limit: break
            r=runner(plan_of([("cpu",n),(other,end)],{})); c=r.compile_fastest()
            for _ in range(5): c.run(feeds)
            ratios=[]
            for _ in range(7):
                a=time.perf_counter(); 
                for _ in range(40): c.run(feeds)
                b=time.perf_counter(); list(c.run_pipelined([feeds]*40)); d=time.perf_counter(); ratios.append((b-a)/(d-b))
            put(which="pipe",at=n,place=i,one_ms=round((b-a)/40*1e3,3),pipelined=round(statistics.median(ratios),3),least=round(min(ratios),3),most=round(max(ratios),3))
            r.close(); del r,c; gc.collect()
