"""Export real-size models with random weights, as skeletons without large weights. arch.py OUT names..."""
import sys, json, torch, onnx, numpy as np
from pathlib import Path
from onnx import numpy_helper as nh
torch.manual_seed(0)
out=Path(sys.argv[1]); out.mkdir(exist_ok=True,parents=True)
def bert(cls, cfg):
    import transformers
    m=getattr(transformers,cls)(cfg).eval(); return m
def text(name):
    import transformers as t
    if name=="bertlarge": m=t.BertModel(t.BertConfig(hidden_size=1024,num_hidden_layers=24,num_attention_heads=16,intermediate_size=4096,attn_implementation="eager"))
    if name=="bert": m=t.BertModel(t.BertConfig(attn_implementation="eager"))
    if name=="minilm": m=t.BertModel(t.BertConfig(hidden_size=384,num_hidden_layers=6,num_attention_heads=12,intermediate_size=1536,attn_implementation="eager"))
    if name=="distilbert": m=t.DistilBertModel(t.DistilBertConfig(attn_implementation="eager"))
    m.eval()
    class W(torch.nn.Module):
        def __init__(s): super().__init__(); s.m=m
        def forward(s, input_ids, attention_mask): return s.m(input_ids=input_ids,attention_mask=attention_mask).last_hidden_state
    a=(torch.randint(0,30000,(2,16)),torch.ones(2,16,dtype=torch.int64))
    return W().eval(), a, ["input_ids","attention_mask"], {"input_ids":{0:"batch",1:"seq"},"attention_mask":{0:"batch",1:"seq"}}
for name in sys.argv[2:]:
    if name=="resnet50":
        import torchvision; m=torchvision.models.resnet50(weights=None).eval(); a=(torch.randn(2,3,224,224),); names=["x"]; dyn={"x":{0:"batch"}}
    elif name=="ocr":
        nn=torch.nn
        class Ocr(nn.Module):
            def __init__(s):
                super().__init__(); ch=[3,64,128,256,256,512]
                s.c=nn.ModuleList(nn.Sequential(nn.Conv2d(i,o,3,padding=1),nn.BatchNorm2d(o),nn.ReLU()) for i,o in zip(ch,ch[1:]))
                s.l=nn.LSTM(1024,256,num_layers=2,bidirectional=True,batch_first=True); s.h=nn.Linear(512,100)
            def forward(s,x):
                for k,c in enumerate(s.c):
                    x=c(x)
                    if k<2: x=nn.functional.max_pool2d(x,2)
                    elif k<4: x=nn.functional.max_pool2d(x,(2,1))
                x=x.permute(0,3,1,2).flatten(2)
                return s.h(s.l(x)[0])
        m=Ocr().eval(); a=(torch.randn(1,3,32,128),); names=["x"]; dyn={"x":{0:"batch",3:"width"}}
    elif name=="vit":
        import torchvision; m=torchvision.models.vit_b_16(weights=None).eval(); a=(torch.randn(2,3,224,224),); names=["x"]; dyn={"x":{0:"batch"}}
    elif name=="whisper":
        import transformers as t
        e=t.WhisperModel(t.WhisperConfig(attn_implementation="eager")).get_encoder().eval()
        class E(torch.nn.Module):
            def __init__(s): super().__init__(); s.e=e
            def forward(s,x): return s.e(x).last_hidden_state
        m=E().eval(); a=(torch.randn(2,80,3000),); names=["x"]; dyn={"x":{0:"batch"}}
    else: m,a,names,dyn=text(name)
    p=out/f"{name}.onnx"
    with torch.no_grad():
        try: torch.onnx.export(m,a,str(p),input_names=names,output_names=["y"],dynamic_axes=dyn,dynamo=False,opset_version=17)
        except Exception as e:
            print("torchscript failed",repr(e)[:200]); ds=tuple({k:torch.export.Dim(v) if isinstance(v,str) else v for k,v in dyn[n].items()} for n in names)
            torch.onnx.export(m,a,str(p),input_names=names,output_names=["y"],dynamic_shapes=ds,dynamo=True,external_data=False)
    mo=onnx.load(str(p)); spec={}
    for t in mo.graph.initializer:
        n=int(np.prod(t.dims)) if t.dims else 1
        if n>=4096 and t.data_type==1:
            arr=nh.to_array(t); spec[t.name]=[list(t.dims),float(arr.std()) or 0.02,float(arr.mean())]
            t.ClearField("raw_data"); t.ClearField("float_data")
    for nd in mo.graph.node:
        pass
    mo.metadata_props.add(key="skeleton",value=json.dumps(spec))
    (out/f"{name}.skel").write_bytes(mo.SerializeToString()); p.unlink()
    for extra in out.glob("*.data"): extra.unlink()
    print(name, (out/f"{name}.skel").stat().st_size, len(spec), [o.version for o in mo.opset_import])
