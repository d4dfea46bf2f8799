# the whole gate on two cards, and serving and splits on two others (four cards, 64 cores)
. /tmp/gpug/part.sh
nproc; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; echo "$(date +%s) begin" > /tmp/g/done
(part 0 0-12 14 suite suite=520) &
(part 0 13-16 4 models models=400) &
(part 1 17-20 4 webgpu webgpu=190; part 1 17-20 4 figures figures=120; part 1 17-18 1 calibration calibration=140) &
(part 1 21-24 4 truth truth=190; part 1 21-24 4 generated generated=150) &
(taskset -c 25-26 timeout 60 python3 /tmp/gpug/fill.py /tmp/gpug/skel /tmp/m ocr resnet50 distilbert bert minilm vit whisper > /tmp/r/fill.log 2>&1
 for s in 1 2 3 4; do CUDA_VISIBLE_DEVICES=0 RLX_CACHE_DIR=/tmp/cg$s taskset -c 27-31 timeout 270 python3 scripts/generate_cases.py --device cuda --minutes 3.5 --first $((s*1000003+1900)) --failures /tmp/r/fail$s.json > /tmp/r/gen$s.log 2>&1 & done; wait) &
(sleep 25; RLX_CACHE_DIR=/tmp/ct TAG=beside timeout 330 bash /tmp/gpug/gY.sh 2 3 32-51 52-63 two > /tmp/r/gy-beside.log 2>&1) &
until_done 430 8; pkill -f /gpu_gate.py; sleep 1; ship; cat /tmp/g/done; tail -qn 1 /tmp/g/*.log | cut -c1-300; tail -qn 2 /tmp/r/gen*.log | cut -c1-200; cut -c1-230 /tmp/r/gy-beside.log | tail -60
