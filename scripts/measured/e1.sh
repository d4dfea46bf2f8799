. /tmp/gpug/part.sh; . /tmp/gpug/sv.sh; rm -f /tmp/g/done; mkdir -p /tmp/g
nproc; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; lscpu | grep -i -E "numa|model name"
(timeout 200 python3 /tmp/gpug/exp.py /tmp/m torchscript minilm bert > /tmp/r/exp2.log 2>&1) &
timeout 200 python3 /tmp/gpug/exp.py /tmp/m torchscript distilbert resnet50 > /tmp/r/exp.log 2>&1; wait; echo "exported $(date +%s)"
sv new "" $W distilbert batch=1,seq=128 "[64,256]" 0-15 16-31 0
sv new "" $W resnet50 batch=1 "[64,256]" 0-15 16-31 0
ship
