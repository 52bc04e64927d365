// Numbers as a person reads them, the same as in `producer status`: `1.2 M`, `12 min`, `3 h 05 min`.
"use strict";

const Words = {
    NONE: "—",

    // 7 000, with thin spaces that do not break.
    count(number) {
        if (number === null || number === undefined) return Words.NONE;
        return Math.round(number).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f");
    },

    // To three digits: 812, 9.8, 41.7 K.
    big(number) {
        if (number === null || number === undefined) return Words.NONE;
        if (number % 1 && Math.abs(number) < 0.95) return String(Number(number.toPrecision(2)));
        if (number % 1 && Math.abs(number) < 9.95) return number.toFixed(1);
        for (const unit of ["", "K", "M", "G", "T"]) {
            if (Math.abs(number) < 999.5 || unit === "T") {
                const digits = unit && Math.abs(number) < 99.95 ? 1 : 0;
                return number.toFixed(digits) + (unit && "\u202f" + unit);
            }
            number /= 1000;
        }
        return Words.NONE;
    },

    // Bytes, decimal.
    size(bytes) {
        if (bytes === null || bytes === undefined) return Words.NONE;
        const said = Words.big(bytes).replace("K", "k");
        return /[a-zA-Z]/.test(said) ? said + "B" : said + "\u202fB";
    },

    // In its two largest units at most.
    duration(seconds) {
        if (seconds === null || seconds === undefined) return Words.NONE;
        const whole = Math.max(0, Math.round(seconds));
        if (whole < 60) return whole + "\u202fs";
        let minutes = Math.round(whole / 60);
        if (minutes < 60) return minutes + "\u202fmin";
        let hours = Math.floor(minutes / 60);
        minutes %= 60;
        if (hours < 48) return hours + "\u202fh " + String(minutes).padStart(2, "0") + "\u202fmin";
        hours = Math.round(whole / 3600);
        return Math.floor(hours / 24) + "\u202fd " + (hours % 24) + "\u202fh";
    },

    share(value) {
        if (value === null || value === undefined) return Words.NONE;
        const percent = 100 * value;
        const down = (number) => Math.floor(number + 1e-9);
        return (percent > 0 && percent < 10 ? (down(10 * percent) / 10).toFixed(1) : down(percent)) + "\u202f%";
    },

    plural(number, one, many) {
        return Words.count(number) + " " + (number === 1 ? one : many);
    },

    clock(seconds, withSeconds) {
        const date = new Date(1000 * seconds);
        const two = (n) => String(n).padStart(2, "0");
        return two(date.getHours()) + ":" + two(date.getMinutes()) + (withSeconds ? ":" + two(date.getSeconds()) : "");
    },

    day(seconds) {
        return new Date(1000 * seconds).toLocaleDateString(undefined, {day: "numeric", month: "short"});
    }
};
