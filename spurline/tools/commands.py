"""The commands of `spurline`, with the module of each. Imports nothing."""

# name: (help line, "module:function"); the function takes the command's arguments and returns an exit code.
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("Train a model, from a preset or from an earlier run's config.json.", "spurline.tools.train:main"),
    "launch": ("Train on several ranks, here or as a job of a cluster.", "spurline.tools.launch:main"),
    "configs": ("List the model families and their presets, or show one preset.", "spurline.tools.configs:main"),
    "runs": ("List runs with their state and losses, and compare two.", "spurline.tools.runs:main"),
    "generate": ("Generate text from a trained model.", "spurline.tools.generate:main"),
    "checkpoint": ("List, verify, inspect and prune the checkpoints of a run.", "spurline.tools.checkpoint:main"),
    "convert": ("Import a Hugging Face model, or export a checkpoint as one.", "spurline.tools.convert:main"),
    "replay": ("Take a step of a run again, and find where it stops being finite.", "spurline.tools.replay:main"),
    "data": ("Tokenize data ahead of training, and verify the result.", "spurline.tools.data:main"),
    "tokenizer": ("Train or inspect a tokenizer.", "spurline.tools.tokenizer:main"),
    "report": ("Write an HTML report of one run, or a comparison of several.", "spurline.tools.report:main"),
    "lr-find": ("Try learning rates at the run's batch size, and suggest one.", "spurline.tools.lr_find:main"),
    "routing": ("Show which experts of a trained model fire on which text.", "spurline.tools.routing:main"),
    "plan": ("Predict memory, bytes and time of a step on a cluster.", "spurline.tools.plan:main"),
    "audit": ("Show what a step does that an accelerator waits for.", "spurline.tools.audit:main"),
    "doctor": ("Show the environment: versions, devices, backends, compilers.", "spurline.tools.doctor:main"),
    "bench": ("Benchmark the MoE layer and the training step against peers.", "spurline.tools.bench:main"),
    "completion": ("Print a script for the shell to complete commands.", "spurline.tools.completion:main"),
    "verify": ("Check all training modes against the reference, on CPU ranks.", "spurline.tools.verify:main"),
}
