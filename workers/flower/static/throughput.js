// The Throughput page: asks for the moment each second and for the charts each five, and fills them in.
// What the figures mean is said where they are made: `workers/flower/snapshot.py` and `series.py`.
"use strict";

(function () {
    const page = document.getElementById("throughput");
    const NOW_MS = 1000, PAST_MS = 5000, DEADLINE_MS = 15000;
    const LANES = {short: 1, long: 2, capture: 3};
    const SPAN_KEY = "eyas-throughput-span";
    const by = (id) => document.getElementById("tp-" + id);
    const put = (id, text) => {
        if (by(id).textContent !== text) by(id).textContent = text;
    };
    let seen = null, answeredAt = null, span = 900;

    const chart = (title, says, options) => new Chart(by("charts"), {title, says, format: Words.big, ...options});
    const charts = {
        tokens: chart("Tokens", "a second, as calls end", {unit: " tok/s"}),
        samples: chart("Samples", "finished a second, as they are committed", {unit: "/s"}),
        flight: chart("In flight", "calls, against the limit", {}),
        waiting: chart("Waiting", "orders in the queue, by lane", {}),
        kv: chart("KV cache", "share in use, by server", {format: Words.share, top: 1}),
        spool: chart("Spool", "states that wait for a sink", {format: Words.size})
    };

    async function ask(url) {
        const answer = await fetch(url, {signal: AbortSignal.timeout(DEADLINE_MS), credentials: "same-origin"});
        const kind = answer.headers.get("Content-Type") || "";
        if (!answer.ok || answer.redirected || !kind.startsWith("application/json")) {
            throw new Error(answer.redirected || answer.status === 401 ? "login" : "answer");
        }
        return answer.json();
    }

    // Asks again and again, never twice at once, and not while nobody looks.
    function keepAsking(everyMs, once) {
        let timer = null, asking = false;
        async function again() {
            if (asking) return;
            clearTimeout(timer);
            if (!document.hidden) {
                asking = true;
                await once();
                asking = false;
            }
            timer = setTimeout(again, everyMs);
        }
        document.addEventListener("visibilitychange", () => document.hidden || again());
        again();
        return again;
    }

    async function askNow() {
        try {
            const now = await ask(page.dataset.now);
            answeredAt = Date.now();
            live(now.answers ? "live" : "error", now.answers ? liveText(now) : "Redis does not answer");
            showNow(now);
        } catch (error) {
            const since = answeredAt ? " for " + Words.duration((Date.now() - answeredAt) / 1000) : "";
            live("error", error.message === "login" ? "Signed out: reload this page" : "Flower does not answer" + since);
            page.classList.add("tp-old");
        }
    }

    async function askPast() {
        try {
            const past = await ask(page.dataset.past + "?span=" + span);
            if (past.answers) showPast(past);
        } catch (error) { /* what is shown stays; `askNow` says what is wrong */ }
    }

    function live(kind, text) {
        by("dot").className = "status-dot status-dot-" + kind;
        put("live", text);
    }

    function liveText(now) {
        const age = now.run && now.run.age_s;
        if (age && age > 4 && now.state !== "finished") return "Figures are " + Words.duration(age) + " old";
        return "Live · " + Words.clock(now.at, true);
    }

    function showNow(now) {
        const away = now.state === "away";
        page.classList.toggle("tp-old", away || now.state === "stalled");
        page.dataset.state = now.state;
        banner(now);
        // What was seen before Redis went away is better than nothing.
        if (away && seen) return;
        by("empty").hidden = Boolean(now.totals);
        by("body").hidden = !now.totals;
        put("run", now.run
            ? `run ${now.run.id.slice(0, 8)} · ${now.run.model} · states ${now.run.states} · ${now.run.folder}`
            : "no run");
        by("run").title = now.run ? now.run.output_dir : "";
        if (!now.totals) {
            const titles = {away: "Redis does not answer", none: "No run", waiting: "The run has begun"};
            put("empty-title", titles[now.state] || "Nothing to show");
            put("empty-says", now.says);
            return;
        }
        seen = now;
        say("notes", now.notes);
        say("alarms", now.checks ? now.checks.alarms : []);
        showTotals(now);
        showTables(now);
        document.title = titleOf(now);
    }

    function say(id, sentences) {
        const list = by(id);
        if (list.dataset.key === JSON.stringify(sentences)) return;
        list.dataset.key = JSON.stringify(sentences);
        list.hidden = !sentences.length;
        list.replaceChildren(...sentences.map((sentence) => {
            const item = document.createElement("li");
            item.textContent = sentence;
            return item;
        }));
    }

    function banner(now) {
        const shown = now.says && (seen || now.totals) && now.state !== "none" && now.state !== "waiting";
        by("banner").hidden = !shown;
        by("banner").className = "tp-banner tp-banner-" + now.state;
        put("banner", shown ? now.says + (now.state === "away" ? " These figures are of " + Words.clock(seen.at, true) + "." : "") : "");
    }

    function titleOf(now) {
        const done = now.totals.wanted ? now.totals.done / now.totals.wanted : 0;
        return (now.state === "finished" ? "done" : Words.share(done)) + " · Throughput · Flower";
    }

    function showTotals(now) {
        const all = now.totals, over = now.state === "finished";
        const minute = all.over_s ? "over the last " + Words.duration(all.over_s) : "not known yet";
        put("output", over ? Words.big(all.output_tokens) + " tok"
            : all.output_per_s === null ? Words.NONE : Words.big(all.output_per_s) + " tok/s");
        put("output-sub", over ? "generated in all" : "generated, " + minute);
        put("samples", over ? Words.count(all.done)
            : all.samples_per_s === null ? Words.NONE : Words.big(all.samples_per_s) + "/s");
        put("samples-sub", over ? "finished in all" : "finished, " + minute);
        put("progress", Words.count(all.done) + " of " + Words.count(all.wanted) + (all.reading ? "+" : ""));
        put("progress-sub", (all.wanted ? Words.share(all.done / all.wanted) + " · " : "") + Words.big(all.tokens)
            + " tokens" + (all.reading ? " · still reading prompts" : ""));
        put("left", over ? "done" : all.left_s === null ? Words.NONE : Words.duration(all.left_s));
        put("left-sub", over ? "every prompt has its outcome" : all.left_s === null ? "not known yet" : "at this speed, by tokens");
        const flight = now.lanes.reduce((sum, lane) => sum + lane.in_flight, 0);
        const limit = now.lanes.reduce((sum, lane) => sum + lane.limit, 0);
        put("flight", Words.count(flight) + " of " + Words.count(limit));
        put("flight-sub", Words.count(now.lanes.reduce((sum, lane) => sum + lane.waiting, 0)) + " wait in the queues");
        put("truncated", Words.share(all.truncated_share));
        put("truncated-sub", Words.count(all.truncated) + " of " + Words.plural(all.generated, "response", "responses"));
        put("failed", Words.count(all.failed));
        put("failed-sub", now.dead_letters.length ? "most: " + now.dead_letters[0].code
            : Words.plural(all.again, "call tried again", "calls tried again"));
        put("wasted", Words.count(all.wasted));
        put("wasted-sub", all.wasted ? Words.big(all.wasted_tokens) + " tokens made twice"
            : Words.plural(all.requeued, "call put back", "calls put back"));
        const checks = now.checks;
        put("checks", checks ? Words.count(checks.samples) : "none yet");
        put("checks-sub", !checks ? "of a few samples, by themselves"
            : checks.alarmed ? Words.plural(checks.alarmed, "sample has an alarm", "samples have an alarm") : "no alarm");
        by("checks-sub").title = checks ? checks.says : "";
        by("checks").parentElement.classList.toggle("tp-alarmed", Boolean(checks && checks.alarmed));
        const oldest = Math.max(-1, ...now.sinks.map((sink) => sink.spool_oldest_s ?? -1));
        put("spool", Words.size(all.spool_bytes));
        put("spool-sub", oldest >= 0 ? "oldest " + Words.duration(oldest) : "empty");
        put("stored", Words.size(all.stored_bytes));
        put("stored-sub", all.disk_free_bytes === null ? "disk not known" : Words.size(all.disk_free_bytes) + " left on the disk");
    }

    function showTables(now) {
        Tables.fill("tp-datasets", now.datasets.map((one) => [
            {text: one.name, sub: datasetState(one)},
            {text: Words.share(one.share), bar: one.share},
            Words.count(one.wanted) + (one.reading ? "+" : ""),
            Words.count(one.generated),
            Words.count(one.stored),
            Words.count(one.failed),
            {text: Words.share(one.truncated_share)},
            Words.big(one.tokens),
            one.finished ? "done" : Words.duration(one.left_s)
        ]), "No dataset yet.");
        Tables.fill("tp-lanes", now.lanes.map((lane) => [
            lane.name,
            {text: Words.count(lane.in_flight) + " of " + Words.count(lane.limit),
                bar: lane.limit ? lane.in_flight / lane.limit : 0},
            Words.count(lane.limit_per_server),
            Words.count(lane.waiting),
            lane.processes ? Words.count(lane.processes) : "no worker"
        ]), "No lane has work or a worker.");
        Tables.fill("tp-servers", now.servers.map((one) => [
            {text: one.url, code: true, sub: one.facts.map(([name, value]) => name + " " + value).join(" · ")},
            {text: one.state, state: one.state, sub: [one.since_s === null ? "" : "for " + Words.duration(one.since_s),
                one.reason].filter(Boolean).join(" · ")},
            {lines: flightOf(one, now.lanes)},
            one.running === null ? Words.NONE : {text: Words.count(one.running) + " run", sub: Words.count(one.queued) + " wait"},
            {text: Words.share(one.kv_used), bar: one.kv_used, alarm: one.kv_used > 0.95},
            Words.count(one.retractions)
        ]), "The run names no server.");
        Tables.fill("tp-sinks", now.sinks.map((one) => [
            one.name,
            {text: one.state, state: one.state, sub: one.says},
            Words.count(one.waiting),
            {text: Words.size(one.spool_bytes), sub: "of " + Words.size(one.spool_max_bytes),
                bar: one.spool_max_bytes ? one.spool_bytes / one.spool_max_bytes : null},
            one.spool_oldest_s === null ? Words.NONE : Words.duration(one.spool_oldest_s),
            Words.size(one.disk_free_bytes)
        ]), "No sink is up: nothing is stored.");
        Tables.fill("tp-failures", now.dead_letters.map((one) => [
            {text: one.code, code: true},
            Words.count(one.count),
            Object.entries(one.datasets).map(([name, count]) => `${name} ${Words.count(count)}`).join(" · ")
        ]), "None.");
    }

    // A server's calls in flight against its limit, a line for each lane that uses it.
    function flightOf(one, lanes) {
        const lines = lanes.flatMap((lane) => lane.servers.filter((server) => server.url === one.url)
            .map((server) => `${lane.name} ${Words.count(server.in_flight)} of ${Words.count(server.limit)}`));
        return lines.length ? lines : [Words.count(one.in_flight)];
    }

    function datasetState(one) {
        if (one.finished) return "done";
        if (one.closed) return "caps reached";
        return one.reading ? "still reading" : "";
    }

    function showPast(past) {
        const lanes = Object.entries(past.lanes), urls = Object.keys(past.servers);
        charts.tokens.show(past, [
            {name: "output", values: past.output, colour: 1, area: true},
            {name: "prompt", values: past.prompt, colour: 2},
            {name: "captured", values: past.captured, colour: 3}
        ]);
        charts.samples.show(past, [{name: "samples", values: past.samples, colour: 1, area: true}]);
        charts.flight.show(past, lanes.flatMap(([name, lane]) => [
            {name: name + " limit", values: lane.limit, colour: LANES[name] || 4, dashed: true, legend: false},
            {name, values: lane.in_flight, colour: LANES[name] || 4, latest: ofLimit(lane)}
        ]));
        charts.waiting.show(past, lanes.map(([name, lane]) =>
            ({name, values: lane.waiting, colour: LANES[name] || 4})));
        charts.kv.show(past, urls.length <= 6
            ? urls.map((url, at) =>
                ({name: url.replace(/^https?:\/\//, ""), values: past.servers[url].kv_used, colour: at + 1}))
            : spread(urls.map((url) => past.servers[url].kv_used)));
        charts.spool.show(past, [{name: "spool", values: past.spool, colour: 1, area: true}]);
    }

    // Many servers' lines as three: at each moment the fullest, the one in the middle and the emptiest.
    function spread(columns) {
        const sorted = columns[0].map((_, at) =>
            columns.map((column) => column[at]).filter((value) => value !== null).sort((a, b) => a - b));
        const line = (name, colour, place) =>
            ({name, colour, values: sorted.map((all) => all.length ? all[Math.round(place * (all.length - 1))] : null)});
        return [line("fullest", 2, 1), line("middle", 1, 0.5), line("emptiest", 3, 0)];
    }

    function ofLimit(lane) {
        const flight = Chart.latest(lane.in_flight);
        return flight === null ? Words.NONE : Words.count(flight) + " of " + Words.count(Chart.latest(lane.limit));
    }

    const buttons = [...document.querySelectorAll("[data-span]")];
    function choose(value) {
        span = value;
        for (const button of buttons) {
            const chosen = Number(button.dataset.span) === span;
            button.classList.toggle("active", chosen);
            button.setAttribute("aria-pressed", String(chosen));
        }
    }
    let kept = null;
    try {
        kept = window.localStorage.getItem(SPAN_KEY);
    } catch (error) { /* a browser that keeps nothing */ }
    choose(buttons.some((button) => button.dataset.span === kept) ? Number(kept) : 900);
    keepAsking(NOW_MS, askNow);
    const pastAgain = keepAsking(PAST_MS, askPast);
    for (const button of buttons) {
        button.addEventListener("click", () => {
            choose(Number(button.dataset.span));
            try {
                window.localStorage.setItem(SPAN_KEY, button.dataset.span);
            } catch (error) { /* the choice holds for this page */ }
            pastAgain();
        });
    }
}());
