"""The values that the pages draw, one module for each page. They are the contract between Python and JavaScript.

Every answer has one path. The server gives it under `/api/PATH`, a report holds it under the same path:

    overview            overview.Overview
    task/KEY            task.TaskView        KEY of `TaskRow.key`
    importance/KEY      importance.ImportanceView  KEY as for task; it takes a second when it is asked for first
    trial/KEY           trial.TrialView      KEY is `TaskView.database + "." + id`, for any id of `TrialColumns`
    run/KEY             run.RunView          KEY of `RunRow.key`
    compare/A/B         compare.CompareView  A and B of `Side.key`; a report holds the pairs in `Overview.compared`
    records             records.RecordsView  live also with a query: see `RecordsView`
    replay              replay.ReplayView

`values.to_json` gives the JSON. Units are in the names: `_ns`, `_s` (seconds; `_at_s` are seconds since 1970), `_bytes`,
`_mhz`. Ratios and shares are plain numbers, where 0.5 is 50 %. Unknown is null. There is no NaN and no infinity. Strings are
foreign: a page shows them as text.

Keys consist of letters, digits, `.` and `-`. They stay the same while the server runs and between reports of the same files.
"""
