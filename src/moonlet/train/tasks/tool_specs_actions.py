"""Everyday tools that do something, known to training by name (see ``tool_notation``)."""

from moonlet.train.tasks.tool_notation import ToolSpec, param

ACTIONS: tuple[ToolSpec, ...] = (
    ToolSpec(
        names=("send_message", "send_email", "send_text", "send_mail", "message", "notify"),
        describes=("Send a message to a person.", "Send an email.", "Sends a text message.",
            "Send a note"),
        params=(
            param("to recipient name contact", "person", "Recipient", "Who gets it",
                "Name of the person"),
            param("text message body content", "text", "The message", "Message text"),
        ),
        asks=(
            "send a message to {0} saying {1}", "send {0} the message {1}", "tell {0}: {1}",
            "write to {0}: {1}",
            "message {0} with the text {1}", "send an email to {0}: {1}",
            "send a mail to {0} saying {1}",
        ),
        results=("status=sent", "~Message sent to $0", "sent=bool", "id=big", "~sent"),
    ),
    ToolSpec(
        names=("set_timer", "start_timer", "timer", "create_timer"),
        describes=("Set a timer.", "Start a timer in minutes.", "Countdown timer"),
        params=(param("minutes duration length", "int", "Minutes", "Duration in minutes"),),
        asks=("set a timer for {0} minutes", "start a {0} minute timer", "?timer for {0} minutes",
            "set the timer to {0} minutes"),
        results=("status=started", "~Timer set for $0 minutes", "timer_id=int", "ends_at=time"),
    ),
    ToolSpec(
        names=("set_alarm", "create_alarm", "alarm", "set_reminder", "create_reminder",
            "remind_me"),
        describes=("Set an alarm with a label.", "Create a reminder.", "Set a reminder at a time."),
        params=(
            param("time at when", "time", "Time, HH:MM", "When"),
            param("text label message title", "text", "What to remind of", "Label", optional=True),
        ),
        asks=(
            "set an alarm for {0}", "set an alarm at {0}", "remind me at {0} to {1}",
            "set a reminder for {0}: {1}",
            "set an alarm for {0} with the label {1}", "wake me at {0}",
            "create a reminder at {0} saying {1}",
        ),
        results=("status=set", "~Alarm set for $0", "id=int time=$0", "ok=bool"),
    ),
    ToolSpec(
        names=("set_light", "switch_device", "set_device", "toggle", "control_device",
            "smart_home"),
        describes=("Turn a device on or off.", "Switch a device.", "Control the devices at home."),
        params=(
            param("device name item", "device", "The device", "Device name"),
            param("on state enabled power", "bool", "Whether it is on", "New state"),
        ),
        asks=(
            "turn on the {0}<1=true>", "turn off the {0}<1=false>", "switch the {0} on<1=true>",
            "switch the {0} off<1=false>", "turn the {0} on<1=true>", "turn the {0} off<1=false>",
            "switch off the {0}<1=false>", "switch on the {0}<1=true>",
        ),
        results=("device=$0 on=$1", "status=done", "~The $0 is set.", "ok=bool"),
    ),
    ToolSpec(
        names=("set_temperature", "set_thermostat", "heat_room", "set_room_temperature"),
        describes=("Set the temperature of a room.", "Control the thermostat."),
        params=(
            param("room name", "room", "The room"),
            param("temperature degrees value", "number", "Degrees", "Target temperature"),
        ),
        asks=(
            "set the {0} to {1} degrees", "heat the {0} to {1}",
            "set the temperature in the {0} to {1}",
            "make the {0} {1} degrees warm",
        ),
        results=("room=$0 temperature=$1", "status=ok", "~The $0 will be $1 degrees."),
    ),
    ToolSpec(
        names=("book_table", "reserve_table", "book_restaurant", "make_reservation"),
        describes=("Book a table at a restaurant.", "Reserve a table."),
        params=(
            param("restaurant name place", "word", "Restaurant name", "The restaurant"),
            param("people guests party_size", "int", "Number of people", "Guests"),
            param("time at", "time", "Time", "HH:MM"),
        ),
        asks=(
            "book a table at {0} for {1} people at {2}", "reserve a table for {1} at {0}, {2}",
            "book {0} for {1} at {2}", "get us a table at {0} for {1} people at {2}",
        ),
        results=("status=booked", "reservation_id=big", "~Booked for $1 at $2",
            "confirmed=bool code=code"),
    ),
    ToolSpec(
        names=("book_flight", "find_flights", "search_flights", "get_flights", "flight_search"),
        describes=("Find flights between two cities.", "Book a flight.", "Search flights"),
        params=(
            param("origin from source departure", "city", "City of departure", "From where"),
            param("destination to target arrival", "city", "City of arrival", "Where to"),
            param("date day", "date", "Date of the flight", "", optional=True),
        ),
        asks=(
            "find a flight from {0} to {1} on {2}", "book a flight from {0} to {1}",
            "find flights from {0} to {1}",
            "?flights from {0} to {1} on {2}?", "?I want to fly from {0} to {1}",
            "?is there a flight from {0} to {1} on {2}?",
        ),
        results=("flight=code price=number", "count=int", "~Flight {code} at {time}",
            "price=number"),
    ),
    ToolSpec(
        names=("create_event", "add_event", "schedule_meeting", "create_meeting",
            "add_calendar_event"),
        describes=("Create a calendar event.", "Add an event to the calendar.",
            "Schedule a meeting."),
        params=(
            param("title name summary", "text", "Title", "Name of the event"),
            param("date day", "date", "Date", "Day of the event"),
            param("time start start_time", "time", "Start time", "", optional=True),
        ),
        asks=(
            "create an event {0} on {1} at {2}", "add {0} to my calendar on {1}",
            "schedule {0} for {1} at {2}",
            "create an event called {0} on {1}", "put {0} on {1} at {2} in the calendar",
        ),
        results=("event_id=big", "status=created", "~Event created on $1", "id=code"),
    ),
    ToolSpec(
        names=("add_task", "add_todo", "create_task", "add_note", "save_note", "todo_add"),
        describes=("Add a task to the list.", "Create a to-do item.", "Save a note."),
        params=(
            param("text title task content", "text", "The text", "What to do"),
            param("urgent important done high_priority", "bool", "Flag", "Whether it applies"),
        ),
        asks=(
            "add the urgent task {0}<1=true>", "add the task {0}, not urgent<1=false>",
            "add a task: {0}, urgent {1}",
            "note {0} with the flag {1}", "save {0} as urgent<1=true>",
            "add {0} to my list, urgent: {1}",
        ),
        results=("status=added", "id=int", "~Task added", "count=int done=bool"),
    ),
    ToolSpec(
        names=("play_music", "play_song", "play", "start_music", "music_player"),
        describes=("Play music.", "Play a song.", "Starts a song or an artist."),
        params=(
            param("song title track query", "pair", "Song title", "What to play"),
            param("volume level", "int", "Volume", "", optional=True),
        ),
        asks=("play {0}", "play the song {0}", "play {0} at volume {1}",
            "start {0} with volume {1}", "?I want to hear {0}"),
        results=("status=playing", "~Playing $0", "track=word seconds=int", "playing=bool"),
    ),
    ToolSpec(
        names=("roll_dice", "random_number", "roll", "get_random", "dice"),
        describes=("Roll dice.", "Random number generator", "Roll a die with some sides."),
        params=(param("sides max faces", "int", "Number of sides", "Largest value"),),
        asks=("roll a die with {0} sides", "roll a {0} sided die",
            "?give me a random number up to {0}", "roll the dice, {0} sides"),
        results=("result=int", "~{int}", "value=int"),
    ),
    ToolSpec(
        names=("flip_coin", "toss_coin", "coin_flip", "ping", "list_files", "list_tasks"),
        describes=("Flip a coin.", "Runs without any input.", "Takes no arguments"),
        params=(),
        asks=("flip a coin", "toss a coin", "?heads or tails?", "run the tool", "use the tool"),
        results=("result=word", "~{word}", "count=int", "status=ok"),
    ),
)  # fmt: skip
