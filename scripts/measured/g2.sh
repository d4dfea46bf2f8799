# the gate on two cards and 32 cores, DETR's profile beside
. /tmp/gpug/part.sh
echo "$(date +%s) begin" > /tmp/g/done
(part 0 0-13 15 suite suite=420) &
(part 1 14-17 4 models models=330; part 1 14-17 4 figures figures=120; part 1 14-17 1 calibration calibration=140) &
(nice -n 5 bash -c '. /tmp/gpug/part.sh; part 0 18-21 4 webgpu webgpu=240') &
(nice -n 5 bash -c '. /tmp/gpug/part.sh; part 1 22-25 4 truth truth=240') &
(nice -n 5 bash -c '. /tmp/gpug/part.sh; part 1 26-31 6 generated generated=170') &
(CUDA_VISIBLE_DEVICES=1 taskset -c 22-31 nice -n 15 timeout 220 python3 /tmp/gpug/prof_unet.py detr 16 > /tmp/r/detr.log 2>&1) &
until_done 520 8; pkill -f /gpu_gate.py; sleep 1; ship; cat /tmp/g/done; tail -qn 1 /tmp/g/*.log | cut -c1-300; head -c 1500 /tmp/r/detr.log; tail -3 /tmp/r/detr.log | cut -c1-300
