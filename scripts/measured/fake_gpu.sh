# fake.sh LANES,BASE,ROW CLIENTS
cd /tmp/prof; . env.sh; PORT=18124
FAKE=$1 PYTHONPATH=/tmp/prof/site3:. python -c "from rlx_ort.cli import main; main()" serve emb.onnx --device cpu --grpc -1 --http-port $PORT --fronts 2 > srv2.log 2>&1 &
S=$!
for i in $(seq 60); do curl -sf localhost:$PORT/v2/health/ready > /dev/null && break; sleep 0.3; done
sed "s/18123/$PORT/" req.bin > req2.bin
python ./.gpug/sv.py client $PORT $(($2/2)) 3 req2.bin > /dev/null
curl -s localhost:$PORT/metrics > m0.txt; c0=$(awk '{print $14+$15}' /proc/$S/stat)
python ./.gpug/sv.py client $PORT $(($2/2)) 8 req2.bin > o1 & python ./.gpug/sv.py client $PORT $(($2/2)) 8 req2.bin > o2; wait %2 2>/dev/null; sleep 0.5
c1=$(awk '{print $14+$15}' /proc/$S/stat); curl -s localhost:$PORT/metrics > m1.txt
python - $((c1-c0)) <<'P'
import json,sys,re
def m(f):
    d={}
    for l in open(f):
        if l.startswith("rlx_inference") and "bucket" not in l:
            k,v=l.rsplit(" ",1); d[re.sub(r"\{.*","",k)]=d.get(re.sub(r"\{.*","",k),0)+float(v)
    return d
a,b=m("m0.txt"),m("m1.txt"); n=b["rlx_inference_request_success_total"]-a["rlx_inference_request_success_total"]
r=[json.load(open(x)) for x in ("o1","o2")]
print("rows/s", round(sum(x["n"] for x in r)/8), "p50", round(r[0]["p50"],1), "main cpu ms/request", round(float(sys.argv[1])*10/n,3), {k[14:-9]: round((b[k]-a[k])/n/1e3,2) for k in b if k.endswith("_us_total") and k.startswith("rlx_inference")}, "rows a batch", round(n/(b["rlx_inference_exec_count_total"]-a["rlx_inference_exec_count_total"]),1))
P
kill $S; wait $S 2>/dev/null
