# serving by default against other fronts and another margin of batch sizes, beside the stress on the second card
. /tmp/gpug/part.sh
G=$(nvidia-smi -L | wc -l); nproc; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
taskset -c 0-3 timeout 60 python3 /tmp/gpug/fill.py /tmp/gpug/skel /tmp/m resnet50 distilbert > /tmp/r/fill.log 2>&1
if [ $G -ge 2 ]; then CUDA_VISIBLE_DEVICES=1 taskset -c 16-31 bash /tmp/gpug/s2.sh ${1:-170} > /tmp/r/stress.txt 2>&1 & fi
export CUDA_VISIBLE_DEVICES=0
serve() { # label fronts
  for m in "distilbert batch=1,seq=128" "resnet50 batch=1"; do set -- "$1" "$2" $m; SV_ARGS="$2" BATCHES="[16,64]" WINDOWS="64:5,64:4,64:4" timeout 60 python3 /tmp/gpug/sv.py /tmp/r/fronts-$1-$3.jsonl /tmp/m/$3.onnx $4 0-9 10-15 > /tmp/r/fronts.log 2>&1; echo "$1 $3"; grep -o '"plain.*\|"rows_s": [0-9.]*\|le=\\"[0-9.+Inf]*\\",}": [0-9.]*\|"cpu": {.*' /tmp/r/fronts-$1-$3.jsonl | tr '\n' ' ' | sed 's/le=\\"//g; s/\\",}"//g' | cut -c1-900; echo; done; }
serve a2 ""; serve a4 "--fronts 4"; ship
sed -i 's/^_NEARLY = 1.08/_NEARLY = 1.02/' rlx_ort/serving/lanes.py
serve b2 ""; serve b4 "--fronts 4"; ship
sed -i 's/^_NEARLY = 1.02/_NEARLY = 1.08/' rlx_ort/serving/lanes.py
for m in "distilbert batch=1,seq=128" "resnet50 batch=1"; do set -- $m; timeout 60 taskset -c 0-9 python3 /tmp/gpug/micro.py /tmp/r/micro.jsonl /tmp/m/$1.onnx $2 2>&1 | tail -5; done
if [ $G -lt 2 ]; then bash /tmp/gpug/s2.sh ${1:-110} > /tmp/r/stress.txt 2>&1; fi; wait; cat /tmp/r/stress.txt; ship
