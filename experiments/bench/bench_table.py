"""Rows of the table that `bitroll bench --csv` writes, from programs that measure other things beside it."""
import datetime
import os

COLUMNS = "date,commit,gpu,row,shape,us,us_min,us_max,floor_us,share,peer,peer_us,ratio,digest".split(",")


def today():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")


def append(path, rows):
    """Prints the rows, dicts with columns for keys, and appends them to the file; without a path prints only. What a row lacks stays empty."""
    text = "".join(",".join(str(row.get(column, "")) for column in COLUMNS) + "\n" for row in rows)
    print(text, end="", flush=True)
    if not path:
        return
    exists = os.path.exists(path) and os.path.getsize(path) > 0
    with open(path, "a", encoding="utf-8") as file:
        file.write(("" if exists else ",".join(COLUMNS) + "\n") + text)
