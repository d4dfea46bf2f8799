# after the gate: the U-Net's profile, and serving with nothing else on its cards
. /tmp/gpug/part.sh
(CUDA_VISIBLE_DEVICES=0 RLX_CACHE_DIR=/tmp/cpu16 taskset -c 0-9 timeout 110 python3 /tmp/gpug/prof_unet.py unet 16 > /tmp/r/prof-unet.txt 2>&1) &
(TAG=alone RLX_CACHE_DIR=/tmp/ct2 timeout 180 bash /tmp/gpug/gY.sh 2 3 32-51 52-63 > /tmp/r/gy-alone.log 2>&1) &
wait; ship; cut -c1-400 /tmp/r/gy-alone.log; cut -c1-170 /tmp/r/prof-unet.txt
