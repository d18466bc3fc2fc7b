"""The schedule of asynchronous training: a state machine without clock or threads.

Generators sample answers for later steps while the trainer works on an earlier one.
Everything that has to be decided for it is decided here, by plain data: who samples
what, which groups go to which optimizer step, when weights move, what is too old, and
what follows a failure. A driver (the process that owns the workers) passes each thing
that happens to `Schedule.on(event)` and carries out the actions that come back.

```
 data order          generators         environments        trainer
 ----------          ----------         ------------        -------
     │ admit           Sample              Score              Train
     ▼                   │                   │                  │
 [unsent] ─────────> [sampling] ─> [sampled] ─> [scoring] ─> [scored]     an answer
     ▲    room, newest   │             ▲            │           │
     │    weights        │             └────────────┤ environment died
     └───────────────────┴──────────────────────────┘           │
       failed, overdue; at most max_attempts                     │
                                                                 ▼
 all answers scored ─> [finished] ─> [in training] ─> trained   a group
                           │               │
                dropped (reported)    trainer died: back to the checkpoint

 [starting] ─> [ready] ─> [resting] ─> [starting] ...            a worker
                  └──> [retired]     too many failures in a row

 published ─> sent ─> confirmed ─> sampled with                  a weight version
```

```
part            consumes      produces         waits for            is unblocked by
──────────────  ────────────  ───────────────  ───────────────────  ────────────────
prompt order    room          groups           StalenessRule.fits,  a step trained,
                                               group_limit          a group dropped
generator       Sample        Answered         newest weights,      WeightsLoaded,
                                               a free place         Answered, Cancel
weight version  StepTrained   LoadWeights      no answer under way  Answered, Cancel
                                               (between answers)
environment     Score         Scored           a sampled answer,    Answered,
                                               a free place         Scored, Cancel
trainer         finished      StepTrained      a full step, groups  a group finished
                groups                         that must be in it   or dropped
checkpoint      StepTrained   CheckpointSaved  an idle trainer      StepTrained
failed worker   WorkerFailed  StartWorker      its backoff          Tick
driver          actions       events           workers, deadlines   next_deadline_s
```

Each wait has a deadline, so nothing above can wait for ever: an answer, a score, a load
of weights, a step, a checkpoint, a start, and above them all the progress of the run.
`rl_algorithms.asynchronous.schedule` is the place to begin reading.

Steps are counted from 0 and versions by steps: weights n are those after n steps, and
step n trains weights n into weights n + 1. The age of an answer in step n is n minus
the version that sampled its oldest token, as in `rl_algorithms.rollout.versions`.
"""
