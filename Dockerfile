# docker build -t octet .
# docker run --rm --gpus all --ipc=host -v "$PWD:/work" -v "$HOME/.cache/huggingface:/root/.cache/huggingface" octet train --preset 8gb
FROM python:3.11-slim-bookworm
COPY trainer /octet/trainer
COPY octet /octet/octet
COPY ds_configs /octet/ds_configs
COPY slurm /octet/slurm
COPY scripts /octet/scripts
COPY README.md LICENSE setup.cfg pyproject.toml constraints.txt train.py run_deepspeed.sh /octet/
# The step of training compiles the modules, which a container that is read-only or new each time could not keep.
RUN cd /octet && ./run_deepspeed.sh --preset nano run.steps=1 eval.problems=8 run.dir=/octet/run && rm -r run
ENV PATH=/octet/.venv/bin:$PATH OCTET_PYTHON=/octet/.venv/bin/python
WORKDIR /work
ENTRYPOINT ["octet"]
CMD ["train"]
