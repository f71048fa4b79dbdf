#include "eval/document_words.h"

namespace omnikv::prose {
namespace {

using SV = std::string_view;

// Each name is a scene: kXOpen, kXMiddle, kXClose. Slots hold for a sentence, a paragraph or a
// chapter (document_words.cc), so a thing that is broken in one sentence is mended in the next.

constexpr SV kMorningOpen[] = {
    "The morning came up {sky}, and {sound} woke the whole of {town}.",
    "It was a {season} morning, {sky}, and the smoke of {town} went straight up.",
    "{hero} was out of bed {early}, for the sky was {sky} and there was much to do.",
    "When {friend} opened the shutters the air smelled of {smell} and of {smell2}.",
    "All night {hero} had heard {sound}, and now the day was {sky}.",
};
constexpr SV kMorningMiddle[] = {
    "A {bird} sat on the {adj} fence and shook its feathers.",
    "{friend} lit the stove {adverb} and set the kettle over it.",
    "From the direction of {place} came {sound}.",
    "There was dew on the {adj} bucket and on the spade.",
    "The {beast} put its head over the half door and asked for its breakfast.",
    "{hero} put on {his} {adj} boots and went to see about the water.",
    "In the lane {few} sparrows were quarrelling over a crust.",
    "{elder} was already sweeping the step, {mood} as ever.",
    "A line of carts from {town2} was waiting at the bridge over {river}.",
    "Over {wood} hung a cloud shaped like a {adj} {thing}.",
    "{child} ran past with {few} loaves under {chis} arm.",
    "The windows were wet, and through them {place} looked further away than it was.",
    "On the table lay the {tool} and the {adj} lamp from the evening before.",
    "{hero} drank {his} tea standing, as {he} did when there was work.",
    "Nobody in {town} had seen such a {season} since {event}.",
};
constexpr SV kMorningClose[] = {
    "By the time the bell rang, {hero} and {friend} were both {mood} and both at work.",
    "So the day began, {sky}, like any other day in {town}.",
    "{hero} looked once more at the sky, took the {tool}, and shut the door.",
    "{elder} said {look} that it would be fine by noon, and for once it was.",
};

constexpr SV kRoadOpen[] = {
    "The road from {town} to {town2} follows {river} for {distance} and then climbs.",
    "{hero} set out for {town2} {time}, with {dish} wrapped in a cloth.",
    "It was {distance} to the next village, and {friend} had chosen to walk.",
    "There are two ways to {town2}, and {hero} took the longer one because of the {beast}.",
    "They left {town} {time}, {hero} in front and {friend} a little behind.",
};
constexpr SV kRoadMiddle[] = {
    "At the turning stood an old {tree} with a seat built round it.",
    "The hedges were full of {plant} that had run wild.",
    "A {stranger} came the other way and wished them a good day.",
    "The {beast} stopped at every gate, and every time it had to be persuaded.",
    "In the ditch lay the wheel of a {adj} cart, and nobody knew whose.",
    "Beyond the ford the ground was soft, and {his} boots let in water.",
    "{friend} told a long tale about {event}, and it shortened the way.",
    "They rested under the {tree} and ate {dish}.",
    "Near {wood} they heard {sound}, though there was no house in sight.",
    "From the top of the hill they could see {town2}, {sky} in the distance.",
    "A milestone leaned in the grass with its letters worn away.",
    "{hero} had a blister, but {he} was {mood} and did not speak of it.",
    "The wind blew from {wood} and carried the smell of {smell}.",
    "{few} sheep followed them for {distance} and then lost interest.",
    "At {inn} they asked the way, and the landlord drew it in spilled beer.",
    "Where the road crosses {river} there is a plank with a {adj} rail.",
    "A {bird} went before them from post to post.",
    "The carter who passed them had {good} under his cover and would not stop.",
};
constexpr SV kRoadClose[] = {
    "They reached {town2} {time}, {mood} and covered in dust.",
    "When {hero} knocked at {inn}, there was one bed left, and it was a {adj} one.",
    "The last of the road was the best, for the moon had come up over {river}.",
    "{friend} said that no road had ever been so long, and fell asleep in {fhis} chair.",
};

constexpr SV kMarketOpen[] = {
    "The market at {town} is held between {place} and {inn}.",
    "On market day {hero} carried {few} baskets of {good} to the square.",
    "People came from {town2} and further to buy {good} that {season}.",
    "{early}, the first stalls were up, and the square smelled of {smell}.",
    "{friend} had promised to look after the stall while {hero} asked the price of {good}.",
};
constexpr SV kMarketMiddle[] = {
    "A {stranger} wanted {good} and would not be told that there was none.",
    "{elder} felt every cheese with a thumb and bought the smallest.",
    "The price of {good2} had gone up since {event}, and everybody said so.",
    "A boy with a {tune} played in front of {place} until the {office} moved him on.",
    "There were {few} sorts of {good}, and {hero} liked none of them.",
    "{friend} sold {few} jars before the clock struck, and was {mood} about it.",
    "The {beast} ate a cabbage that had not been paid for.",
    "A woman from {town2} held up a {clothes} and called out how warm it was.",
    "{child} stood a long time before the stall with the {adj} toys.",
    "They weighed the {good} {adverb}, and then they weighed it again.",
    "Somebody had left a {adj} {thing} on the steps with a card that said it was for sale.",
    "The {trade} from {town2} praised his own work until people walked away.",
    "{hero} changed a {colour} cloth for {few} candles, and both sides were content.",
    "Under the awning {elder} and the {office} talked about {good2}.",
    "The man with the {good} shouted louder as the day grew cooler.",
    "A dog ran off with a string of sausages, and half the market ran after it.",
    "{friend} tasted {dish} at the corner stall and said it wanted salt.",
    "The rain began {time}, and the sellers of {good2} covered their tables.",
};
constexpr SV kMarketClose[] = {
    "{hero} came home with an empty basket and a purse that was not quite empty.",
    "{late}, the square was bare again except for straw and {few} pigeons.",
    "They had sold less than they hoped, but {friend} had got the {good} for a song.",
    "On the way back {hero} said that next time {he} would go to {town2} instead.",
};

constexpr SV kLetterOpen[] = {
    "The letter came {time}, folded small and sealed with {colour} wax.",
    "{hero} had not heard from {his} {kin} for {span} when the letter came.",
    "The carrier from {town2} brought a {adj} parcel and a letter for {friend}.",
    "{elder} could not read without spectacles, and so {hero} read the letter aloud.",
    "There was a letter on the mat, and the hand was that of {his} {kin}.",
};
constexpr SV kLetterMiddle[] = {
    "It said that the {kin} was well and had planted {plant}.",
    "The first page was all about {event}, and the second was about {good}.",
    "Between the lines somebody had drawn a {bird} and a {adj} {thing}.",
    "\"We have had {sound} every night,\" it said, \"and nobody can sleep.\"",
    "\"The {beast} you gave us is fat,\" wrote the {kin}, \"and knows it.\"",
    "There was a blot where the writer had stopped to eat {dish}.",
    "\"Come to us when the roads are dry,\" it went on, \"and bring {good}.\"",
    "{hero} read that part {adverb}, and then {he} read it once more.",
    "The {office} of {town2} had been ill with a {ailment}, it seemed.",
    "A dried flower fell out, one of the {plant} from beside the gate.",
    "\"Tell {friend},\" it said at the end, \"that the {thing} still goes.\"",
    "{friend} asked {look} whether there was any word of the money.",
    "\"I have bought a {clothes},\" said the letter, \"and I am told that I look {mood} in it.\"",
    "It had been written at {inn}, on paper that smelled of {smell}.",
    "Some words were spelled in a way that made {child} giggle.",
    "The writer had been to {town2} and thought the people there {mood}.",
};
constexpr SV kLetterClose[] = {
    "{hero} folded the letter and put it behind the {thing}, where the others were.",
    "{friend} sat down {time} to write an answer, and it took {span}.",
    "For the rest of the day {hero} was {mood}, and nobody asked why.",
    "They kept the wax, for {child} liked the {colour} of it.",
};

constexpr SV kGardenOpen[] = {
    "Behind the house {hero} had a garden, narrow and long, with {plant} on both sides.",
    "That {season} the {plant} did better than anyone had hoped.",
    "{elder} knew more about {plant} than anybody in {town}.",
    "{friend} had been given {few} roots of {plant} and did not know where to put them.",
    "The garden at {place} had been let go for {span}, and {hero} meant to save it.",
};
constexpr SV kGardenMiddle[] = {
    "Between the {plant} and the wall there was room for {plant2}.",
    "A {bird} followed the spade and took what it turned up.",
    "Snails had been at the {plant2}, and {friend} gathered {few} of them in a pot.",
    "The soil was poor there, full of stones and bits of {colour} plate.",
    "{hero} tied up the {plant} {adverb} with strips of an old {clothes}.",
    "Under the {tree} nothing would grow but moss.",
    "They carried water from {river} in {few} {adj} cans.",
    "{child} had a bed of {chis} own, in which there were mostly feathers.",
    "The {beast} got in {time} and trod on the {plant2}.",
    "{elder} gave advice over the wall, and some of it was good.",
    "Seed was dear that year, so {hero} had kept some in a {adj} tin.",
    "By the water butt grew mint, and by the gate there were {plant2}.",
    "{friend} dug {adverb} until the row was as straight as a string.",
    "The bees came from the hives behind {place} as soon as it was warm.",
    "It wanted rain, and the sky was {sky}, but no rain came.",
    "The {office} stopped to say that his own {plant} were taller.",
    "A {adj} wheelbarrow stood in the path with a {bird} on its handle.",
};
constexpr SV kGardenClose[] = {
    "{late}, {hero} leaned on the spade and thought that it would do.",
    "They ate the first of them with {dish}, and {elder} had the largest share.",
    "When the frost came the beds were covered with straw, and the {bird} kept watch.",
    "{friend} put the tools away, and the garden smelled of {smell}.",
};

constexpr SV kRepairOpen[] = {
    "The {thing} had been out of order for {span}, and {elder} wanted it back.",
    "{hero} turned the {thing} over and looked at it {adverb}.",
    "\"It is only the {part},\" said {friend}, but it was not only the {part}.",
    "Somebody had brought a {adj} {thing} to the shop and left it on the bench.",
    "A {thing} is easily broken and not so easily mended.",
};
constexpr SV kRepairMiddle[] = {
    "First {hero} took out the {part}, and then the {part2} came out by itself.",
    "The {part} was worn as thin as paper.",
    "{friend} held the lamp while {hero} worked with the {tool}.",
    "There was dust in it from before {event}.",
    "The {tool} was too large, and the other {tool2} had been lent to {elder}.",
    "{hero} cut a new {part} from a piece of {tree}.",
    "It took {few} tries before the {part} would sit straight.",
    "Under the rust {friend} found the mark of a {trade2} in {town2}.",
    "{child} was given the {part2} to hold and nearly lost it.",
    "A drop of oil did more than all the work with the {tool}.",
    "The glue had to stand {span}, so they did something else.",
    "{hero} never threw away a {part}, and now it proved to be wise.",
    "{elder} came to ask {look} how the {thing} was getting on.",
    "The {thing} had belonged to a {kin} of the {office}, and it was not to be scratched.",
    "One side was {colour}, the other had been painted {colour2} by somebody in a hurry.",
    "\"Hand me the {tool},\" said {hero} {look}.",
    "\"They do not make them like this in {town2},\" said {friend} {look}.",
};
constexpr SV kRepairClose[] = {
    "{late}, the {thing} was whole again, and better than before.",
    "{elder} paid with {good} and a story, and the {thing} went home on a cart.",
    "{hero} washed {his} hands and hung the {tool} in its place.",
    "It never worked quite as it had, but {elder} said that nor did anybody.",
};

constexpr SV kHistoryOpen[] = {
    "In old times there was no bridge at {town}, and people crossed {river} by boat.",
    "Nobody knows who built {place}, though many people say they do.",
    "The name of {town} is older than the church and older than the road.",
    "Before {event} there were {few} houses here and a well.",
    "The parish book tells how {town} got its market.",
};
constexpr SV kHistoryMiddle[] = {
    "The land on that side belonged to an abbey that kept sheep and sold {good}.",
    "After {event} many families moved to {town2} and did not return.",
    "A lord gave the common to the people, and his grandson tried to take it back.",
    "They lost {place} once by fire and once by water.",
    "In those days every house paid a tax of {good} to the {office}.",
    "A {trade} from over the sea settled by {river} and taught the others.",
    "The stones of the old wall are now in the pigsties of {town2}.",
    "For {span} soldiers camped in {wood}, and they cut down the best of it.",
    "There was a school, but the master was {mood} and taught only {lesson}.",
    "The mill changed hands {few} times in the years after {event}.",
    "It is said that a queen slept at {inn} and complained of the pillows.",
    "The first {office} could not write, and signed with the picture of a {bird}.",
    "When the canal came, the carters grew poor and the sellers of {good} grew rich.",
    "The bell was cast in a field, and it has always been a little flat.",
    "{few} men of {town} went to the wars, and their names are cut in the {tree} door.",
    "A great {tree} stood where {inn} is now, and courts were held beneath it.",
    "{river} has changed its bed since then, and the old one is full of {plant}.",
    "The ancestors of {elder} came with the salt trade and stayed for the quiet.",
};
constexpr SV kHistoryClose[] = {
    "So the town grew, a house at a time, and it is not a large one even now.",
    "All that is left of it is a {adj} stone behind {place}.",
    "{elder} remembers the end of it, and tells it differently every time.",
    "The book is kept in a chest at {place}, and the mice have read most of it.",
};

constexpr SV kSupperOpen[] = {
    "There was {dish} for supper, and {friend} had stayed to help with it.",
    "{hero} laid the table {adverb} for {few} people.",
    "It was the custom in {town} to eat {dish} on that evening.",
    "The kitchen smelled of {smell}, and the lid of the pot was dancing.",
    "\"Sit down,\" said {elder}, \"there is {dish}, and it will not wait.\"",
};
constexpr SV kSupperMiddle[] = {
    "{child} wanted more, and there was more.",
    "{friend} cut the loaf against {fhis} chest in the old way.",
    "They talked about {event}, and about the {office}, who was {mood}.",
    "Somebody had put {good} into the dish, which {elder} had never seen done.",
    "The {beast} lay under the table and hoped.",
    "{hero} passed the salt {adverb}.",
    "There were {few} plates and no two alike, and one of them was {colour}.",
    "A {stranger} was given the chair near the fire, and a spoon.",
    "The candles burned low and smelled of {smell2}.",
    "{elder} told them what people used to eat before {event}.",
    "After that there was {dish2}, of which {friend} had three helpings.",
    "The rain had begun, and it made the room seem smaller and warmer.",
    "\"My {kin} made it with {good},\" said {elder} {look}.",
    "\"It wants an onion,\" said {friend} {look}.",
    "Nobody spoke of the {thing}, though everyone thought of it.",
    "{hero} had burned {his} thumb on the pan and held it in the water jug.",
};
constexpr SV kSupperClose[] = {
    "When the pot was empty they washed up together and let the fire go down.",
    "{elder} fell asleep in the chair, and they covered the old knees with a {clothes}.",
    "{late}, {friend} took a lantern and went home by {place}.",
    "It was a plain supper, but {hero} thought of it long afterwards.",
};

constexpr SV kShopOpen[] = {
    "The workshop of a {trade} is never quite tidy, and {hero} had stopped trying.",
    "{hero} had learned to be a {trade} from {his} {kin}, who was strict.",
    "There was more work than usual that {season}, and {friend} came to help.",
    "Over the door hung the sign of the {trade}, {colour} and {colour2}.",
    "A {trade} must have good light, so the bench stood by the window.",
};
constexpr SV kShopMiddle[] = {
    "On the wall hung {few} tools, each with its shadow painted behind it.",
    "The {tool} had a handle of {tree}, dark with use.",
    "A {stranger} came in to ask the price of a {thing} and stayed for {span}.",
    "{friend} was a {trade2} and had other ways, and they argued {adverb}.",
    "In the corner stood a {thing} that nobody had called for since {event}.",
    "The {office} ordered {few} of them and asked that they should be {colour}.",
    "{hero} worked {adverb}, and the shavings fell round {his} feet.",
    "The apprentice swept the floor and found a {find}.",
    "There was always a pot of something that smelled of {smell} on the stove.",
    "{elder} liked to sit by the bench and talk about {good}.",
    "One must never hurry a {adj} piece, {hero} said, nor a {mood} customer.",
    "The shutters were {colour}, and children had drawn a {bird} on one of them.",
    "The new {tool2} came from {town2} and was not as good as the old.",
    "{child} was allowed to turn the handle if {chis} hands were clean.",
    "Work that is done slowly lasts, and {hero} had the proof of it on the shelf.",
    "The bill was written on the back of an old song.",
};
constexpr SV kShopClose[] = {
    "{late}, {hero} put out the lamp and counted what the day had brought.",
    "The piece was finished, and {friend} admitted that it was a good one.",
    "So the order went to {town2}, packed in straw, with {hero}'s mark on it.",
    "{hero} locked up, tried the door twice, and went to look for {his} supper.",
};

constexpr SV kBoatOpen[] = {
    "{river} was high that week, and the ferry did not run.",
    "{friend} had the use of a {adj} boat and knew the banks well.",
    "They went down {river} {time}, with {good} under a sheet.",
    "Below {place} the water runs slow and brown between the {tree} roots.",
    "{hero} was no sailor, and said so before they pushed off.",
};
constexpr SV kBoatMiddle[] = {
    "A {bird} stood in the shallows and would not move for them.",
    "The current took them past {place} faster than a horse can trot.",
    "{friend} stood in the stern and steered {adverb} with one oar.",
    "Water came in by the third plank, and {child} baled with a {adj} hat.",
    "On the bank {few} cows stood in a row and watched.",
    "The {tree} branches hung so low that they had to lie down.",
    "They spoke to a {stranger} who was fishing for eels.",
    "The rope was wet and stiff and smelled of {smell}.",
    "At the weir they carried the boat round, and it was heavier than it looked.",
    "Somewhere behind the reeds there was {sound}.",
    "\"Keep to the left,\" said {friend} {look}.",
    "{hero} trailed a hand in the water and thought about {dish}.",
    "A barge came up with {good}, pulled by a {colour} horse.",
    "The light on the water was {sky}, and it hurt the eyes.",
    "They passed {few} islands, on one of which somebody kept goats.",
    "{elder} had crossed here as a child, in the days of {event}.",
    "The mist lay on {river} like a {adj} blanket.",
};
constexpr SV kBoatClose[] = {
    "They tied up at {inn}, and {hero} was glad of the dry ground.",
    "{late}, the boat lay bottom up on the grass, and the baskets were all safe.",
    "\"We might have walked,\" said {hero}, and {friend} laughed all the way to {place}.",
    "The river was quiet behind them, and the lamps of {town2} stood in it.",
};

constexpr SV kSchoolOpen[] = {
    "{child} went to school in {town} when there was nothing better to do.",
    "The schoolmaster at {town} was {mood}, and he loved {lesson}.",
    "That day the lesson was {lesson}, and {child} had not learned it.",
    "There were {few} benches in the school, and {child} had the one by the window.",
};
constexpr SV kSchoolMiddle[] = {
    "A {bird} came to the sill, and nobody heard what was said about {lesson}.",
    "The stove smoked, and the room smelled of {smell}.",
    "The girl from {town2} knew everything and was {mood} about it.",
    "{child} drew a {adj} {thing} on the slate and rubbed it out again.",
    "Somebody had brought a {beast} in, and it sat at the back.",
    "The ink was {colour} that week because of a mistake.",
    "\"Where does {river} begin?\" asked the master, and nobody knew.",
    "{child} could say {lesson2} backwards, but was never asked.",
    "The master told them about {event} until the bell rang.",
    "There was {dish} in {chis} basket, and {child} shared it with the {office}'s son.",
    "On the wall hung a map on which {town} was only a stain.",
    "The smallest boy fell asleep against the wall.",
    "They sang {few} verses, and the last one went wrong.",
    "{child} wrote the same line {few} times, each a little more crooked.",
    "In the break they played at {event} behind {place}.",
};
constexpr SV kSchoolClose[] = {
    "{late}, they were let go, and the noise of it reached {inn}.",
    "{child} told {hero} about it {time}, and left out the best part.",
    "The master wiped the board and sat for a while alone with the quiet.",
    "\"What did you learn?\" asked {friend}, and {child} said that it was {lesson}.",
};

constexpr SV kBeastOpen[] = {
    "{elder} had a {beast} that was known all over {town}.",
    "The {beast} came to {hero} in the year of {event}.",
    "Nobody could say why the {beast} would not go past {place}.",
    "It was the {beast} that heard it first, {time}.",
    "The {beast} had got out again, and {child} was sent to look for it.",
};
constexpr SV kBeastMiddle[] = {
    "It liked {good} and it liked {dish}, and it did not like the {office}.",
    "{hero} called it {adverb}, and it pretended to be deaf.",
    "They found hoof marks, or something like them, beside {river}.",
    "A {stranger} had seen it near {inn}, eating {plant}.",
    "It stood in the middle of the road and looked {mood}.",
    "{friend} held out a piece of apple and spoke to it {adverb}.",
    "It had once carried {good} all the way to {town2} without a halt.",
    "{child} tied a {colour} ribbon round its neck, and it ate the ribbon.",
    "The {trade2} offered {few} coins for it, but it was not for sale.",
    "In bad weather it slept by {place}, against the warm wall.",
    "It was afraid of nothing but a {bird} and a {thing}.",
    "One ear was torn, and there was a story about that too.",
    "{elder} talked to it as one talks to a {kin}.",
    "It knocked over a {adj} pail and then stood in what was spilled.",
    "When {sound} began it lifted its head and listened.",
    "The children said that it could find its way home from {wood} in the dark.",
};
constexpr SV kBeastClose[] = {
    "{late}, it came back by itself, with burrs in its coat and no shame at all.",
    "{elder} scolded it and fed it, and that was the end of the matter.",
    "{hero} shut the gate twice that night, and in the morning it was open.",
    "They say that it is still alive, but it must be a different one.",
};

constexpr SV kQuarrelOpen[] = {
    "The quarrel was about a {thing}, and it had lasted {span}.",
    "{elder} and the {office} had not spoken since {event}.",
    "It began with {good}, as such things do.",
    "{friend} was {mood}, and {hero} was {mood2}, and so they fell out.",
};
constexpr SV kQuarrelMiddle[] = {
    "\"It was never yours,\" said {elder} {look}.",
    "\"I paid for it with {good},\" said {friend} {look}.",
    "\"You may keep the {thing},\" said {hero}, \"but the {part} is mine.\"",
    "The {office} was sent for, and came {adverb}.",
    "Each of them had {few} witnesses, and all the witnesses were cousins.",
    "{friend} walked to {town2} and back to be less angry.",
    "For {span} they used different doors of the same church.",
    "Somebody moved a fence in the night, and somebody else moved it back.",
    "{child} carried messages between the houses for {good} and learned new words.",
    "At {inn} people took sides, and a {adj} jug was broken.",
    "{hero} said something about the {clothes}, and it made things worse.",
    "The {stranger} who had been asked to judge went away {time}.",
    "Both of them loved the same {tree}, and neither would prune it.",
    "There was a paper about it, but mice had eaten the half that mattered.",
    "\"Let us ask {elder},\" said {friend} {look}.",
    "The {beast} belonged to neither side and was fed by both.",
};
constexpr SV kQuarrelClose[] = {
    "In the end they shared {dish} and could not remember who had begun.",
    "{elder} put the {thing} in the middle of the table, and they all had to laugh.",
    "They shook hands {late}, and {town} had to find something else to talk about.",
    "The quarrel was never settled, but it was mended, which is better.",
};

constexpr SV kFeastOpen[] = {
    "For {feast} the whole of {town} was swept and painted.",
    "{hero} had been asked to play the {tune} at {feast}.",
    "Nobody works on the day of {feast}, except those who cook.",
    "There was to be dancing at {place} after {feast}.",
};
constexpr SV kFeastMiddle[] = {
    "{friend} hung {few} lanterns in the {tree}, and one of them burned.",
    "The tables reached from {inn} to {place}.",
    "There was {dish} for everyone and {dish2} for those who came early.",
    "An old man from {town2} played the {tune} with his eyes shut.",
    "{elder} wore a {colour} {clothes} that had not been seen since {event}.",
    "{child} was a {bird} in the play and forgot to sing.",
    "The {office} made a speech about {good}, and the wind took most of it.",
    "They danced {adverb}, and then they danced faster.",
    "A {stranger} won the race and was given a {beast}.",
    "There was a prize for the best {plant}, and it went to {elder} as always.",
    "The drum had a hole in it, but the {tune2} was loud enough.",
    "{hero} danced with everybody's {kin} and trod on {few} feet.",
    "Somebody let the geese out, and they joined the procession.",
    "The young people jumped over {river} where it is narrow, and one did not.",
    "Paper flowers, {colour2} and white, hung over every door.",
    "{friend} was asked to sing and sang {few} songs, all of them sad.",
};
constexpr SV kFeastClose[] = {
    "{late}, the last lantern went out, and they walked home singing.",
    "It rained in the end, but by then nobody cared.",
    "{hero} slept until noon, and so did the rest of {town}.",
    "Of all the feasts that {elder} had seen, this was the loudest.",
};

constexpr SV kFireOpen[] = {
    "It was too dark to work, so {elder} told them a story by the fire.",
    "{friend} put another log of {tree} on the fire and began.",
    "On such nights {child} always asked for the same tale.",
    "The wind was in the chimney, and {hero} drew the chairs closer together.",
};
constexpr SV kFireMiddle[] = {
    "There was once a {trade} who had {few} daughters and a {beast}.",
    "The king of that country was {mood} and wanted a {thing} made of glass.",
    "A {bird} came to the window and spoke with the voice of a {kin}.",
    "\"You must go as far as {river} goes,\" it said, \"and then {distance} more.\"",
    "So the youngest put on a {colour} {clothes} and went {adverb} out of the gate.",
    "On the way she met a {stranger} who asked for {dish}.",
    "She gave half of it away, and in return she got a {find}.",
    "In the forest stood a house with {few} doors, and all but one were painted.",
    "An old woman sat there and spun {good} into something like moonlight.",
    "The giant slept for {span} and woke only when there was {sound}.",
    "She hid under a {thing} and counted his steps.",
    "The {beast} knew the way, though it had never been there.",
    "When the {find} was broken a whole orchard came out of it.",
    "The wicked {office} was turned into a {tree}, and he is that still.",
    "{child} asked {look} whether it was true, and {elder} said that it was old.",
    "Here {friend} stopped to fill a pipe, and everybody waited.",
    "The fire cracked, and {child} moved nearer to {hero}.",
};
constexpr SV kFireClose[] = {
    "And if they have not moved house since, they are there still, said {elder}.",
    "{child} was asleep before the end, so the end was kept for another night.",
    "The fire had burned down to a {adj} red heap, and nobody wished to get up.",
    "\"My {kin} told it better,\" said {elder} {look}.",
};

constexpr SV kHouseOpen[] = {
    "The house of {elder} stands between {place} and {river}.",
    "It was a {adj} house with {few} windows and a {colour} door.",
    "{hero} rented a room above {inn}, and it was {adj}.",
    "Nobody had slept in the upper room since {event}.",
};
constexpr SV kHouseMiddle[] = {
    "On the shelf stood {few} cups, a {thing}, and a picture of somebody's {kin}.",
    "The stairs creaked, each with a note of its own.",
    "One wall was {colour}, and the others had been so once.",
    "Through the window one saw the top of a {tree} and a piece of {place}.",
    "There was a smell of {smell}, and under it a smell of {smell2}.",
    "In the passage hung a {clothes} that belonged to nobody.",
    "The {part} of the front door had to be lifted and pushed.",
    "A {bird} had built in the chimney, and they did not light that fire.",
    "The bed was {adj}, and it had come from {town2} in pieces.",
    "In the cellar {elder} kept {good} and did not say how much.",
    "The clock on the landing told the time of some other town.",
    "Under the floor lay straw and the shoe of a child, for luck.",
    "{friend} said {look} that a house like that wanted people in it.",
    "The roof let in rain at {few} places, and each had its bowl.",
    "The carpet had been {colour2} when the {kin} of {elder} bought it.",
    "On the kitchen door were marks that showed how {child} had grown.",
    "The {beast} slept on the best chair, and nobody disputed it.",
};
constexpr SV kHouseClose[] = {
    "{hero} thought {late} that one could be content in such a house.",
    "They aired the rooms for {span}, and then it was a house again.",
    "When the lamp stood in the window it could be seen from {wood}.",
    "{elder} would not sell it, not for all the {good} in {town2}.",
};

constexpr SV kHarvestOpen[] = {
    "They began to cut the field below {wood} {early}.",
    "The barley stood well that year, and everybody in {town} was wanted.",
    "{hero} was no farmer, but at harvest one does not ask.",
    "Farm work in that valley follows the bell of {town}.",
};
constexpr SV kHarvestMiddle[] = {
    "{friend} cut and {hero} bound, and {child} carried the water.",
    "There were {few} of them in a row, and {elder} set the pace.",
    "A {bird} had its nest in the corn, and they went round it.",
    "At noon they sat under the {tree} and ate {dish}.",
    "The sky was {sky}, and the farmer looked at it too often.",
    "Somebody sang {adverb}, and the others came in at the end of the line.",
    "The cart sank to the axle, and it took {few} men to free it.",
    "{his} hands were sore, and {friend} gave {him} a rag dipped in {good}.",
    "A {stranger} stopped on the road and asked if there was work.",
    "The stubble smelled of {smell} and pricked through the stockings.",
    "The {beast} would not pass the scarecrow, which wore a {clothes}.",
    "Mice ran before the blades, and the {bird} had a good day.",
    "They talked of {event}, when half of it had been lost.",
    "The last sheaf was given to {child} to carry home.",
    "By the gate the women had set out {few} jugs in the shade.",
    "The {office} came to count the stacks and was given cider.",
};
constexpr SV kHarvestClose[] = {
    "{late}, the field was bare and seemed much larger.",
    "They were paid in {good} and in thanks, and both were welcome.",
    "The rain waited until the last load was under cover.",
    "{hero} could not lift {his} arms the next day, and was {mood} all the same.",
};

constexpr SV kFoundOpen[] = {
    "{child} found a {find} in the mud below {place}.",
    "In the pocket of the old {clothes} there was a {find}.",
    "{hero} had lost {his} {find}, and the whole house was turned over.",
    "Behind the {thing} lay a {find} that nobody had ever seen.",
};
constexpr SV kFoundMiddle[] = {
    "It was {adj}, and there were letters on it, too worn to read.",
    "{friend} thought that it belonged to the {office}.",
    "They asked at {inn} and they asked at {place}, and nobody had missed a {find}.",
    "{elder} looked at it {adverb} and gave it back.",
    "\"There was one like it in the days of {event},\" said {elder} {look}.",
    "They looked in the {thing}, and behind the {plant}, and down the well.",
    "{child} slept with the {find} under {chis} pillow.",
    "A {stranger} offered {good} for it, a little too quickly.",
    "It had lain there {span} at least, for it was {colour} with age.",
    "{hero} cleaned the {find} with a {tool} and a drop of vinegar.",
    "The {bird} that nests at {place} is a thief, and so they climbed up to see.",
    "A notice was put on the door of {place}, written in {colour} chalk.",
    "{friend} remembered that {fhis} {kin} had once lost something of the kind.",
    "Inside there was a lock of hair and a scrap of a {colour2} dress.",
    "The {trade2} said that it was good work, not from {town} but from {town2}.",
    "They found instead {few} spoons, a {adj} doll, and a very old bun.",
};
constexpr SV kFoundClose[] = {
    "It was never claimed, and it hangs by the door to this day.",
    "{late}, {hero} gave the {find} to {child}, and said no more about it.",
    "The owner wept a little and sent them {good} in return.",
    "It had been in the first place they looked, as lost things are.",
};

constexpr SV kGuestOpen[] = {
    "A {stranger} came to {town} {time} and asked for {elder}.",
    "Nobody had expected the {stranger}, least of all {hero}.",
    "The coach from {town2} set down one passenger, a {stranger}.",
    "There was a {stranger} at {inn} who paid in advance and asked about {wood}.",
};
constexpr SV kGuestMiddle[] = {
    "He wore a {clothes} and spoke like somebody from beyond {town2}.",
    "\"I am looking for a {trade},\" said the {stranger} {look}.",
    "\"Then you have come too late,\" said {friend} {look}.",
    "In the bag there were {few} books, a {tool}, and a {adj} box.",
    "The {office} wrote the name down and spelled it wrong.",
    "{child} followed the {stranger} as far as {place}.",
    "They gave the guest {dish}, and it was eaten {adverb}.",
    "{elder} turned pale, or perhaps it was the light.",
    "It turned out that they had both known a {kin} of {hero}.",
    "The guest asked whether {place} had always been {colour}.",
    "{hero} showed the way and asked no questions.",
    "At night a lamp burned in the guest's window until {sound} was heard.",
    "People said that it had to do with {event}.",
    "The {stranger} drew {place} from {few} sides and gave the best sheet to {friend}.",
    "The {beast} took to the stranger at once, which spoke for him.",
    "He had walked all the way from the sea, and his boots showed it.",
};
constexpr SV kGuestClose[] = {
    "{late}, the {stranger} was gone, and on the table lay {few} coins and a {find}.",
    "He stayed {span}, and afterwards {town} felt emptier.",
    "What he had said to {elder} nobody ever learned.",
    "{hero} walked with him to the bridge, and there they parted.",
};

constexpr SV kSickOpen[] = {
    "{friend} had a {ailment} and was told to stay in bed.",
    "When {elder} fell ill {hero} went to fetch the doctor from {town2}.",
    "The {ailment} began {time}, and nobody thought much of it.",
    "{child} came home from {place} with a {ailment}, and was {mood} about it.",
};
constexpr SV kSickMiddle[] = {
    "The doctor looked {mood}, and asked for a spoon and a candle.",
    "Every neighbour had a cure, and most of them had {good} in it.",
    "{hero} sat by the bed and read aloud about {event}.",
    "A {bird} sang in the {tree} outside, and it seemed a good sign.",
    "{elder} sent {dish} and a {colour} blanket.",
    "The medicine was {colour}, and it tasted of {smell}.",
    "The fever rose {time} and fell again before it was light.",
    "{his} {kin} had had the same, and had got over it in {span}.",
    "They stuffed the window with a {clothes} against the draught.",
    "\"Lie still,\" said {hero} {look}.",
    "\"I have lain still for {span},\" said {friend} {look}.",
    "The {office} called and stood {adverb} at the foot of the bed.",
    "The {beast} would not leave the mat before the door.",
    "The tea was made from {plant} and had to be drunk hot.",
    "For {span} the workshop was shut, and a card on the door said why.",
    "The clock was stopped, because its ticking was too loud.",
};
constexpr SV kSickClose[] = {
    "{late}, there was a call for {dish}, and they knew that the worst was over.",
    "The doctor would take no money, only a jar of {good}.",
    "After {span} there was nothing left of it but a story.",
    "A chair was put in the sun beside the {plant}, and that did more than the doctor.",
};

constexpr SV kWoodOpen[] = {
    "In {wood} the paths change from year to year, and {hero} knew it.",
    "{friend} and {child} went to {wood} {time} to gather sticks.",
    "It is dark in {wood} even when the day is {sky}.",
    "Nobody goes to {wood} after the bell, because of {event}.",
};
constexpr SV kWoodMiddle[] = {
    "A {bird} called from one {tree}, and another answered from far off.",
    "The ground was soft and smelled of {smell}.",
    "They came to a {adj} hut where a {trade2} had worked in former times.",
    "{child} found {few} mushrooms, and {friend} threw most of them away.",
    "Between the roots of a {tree} lay a {find}.",
    "The light fell softly through the leaves, {colour} and gold.",
    "Somebody had cut the picture of a {bird} into the bark.",
    "They heard {sound}, and then they knew which way the town lay.",
    "A stream, too small for a name, ran down towards {river}.",
    "{hero} marked the way with bits of a {colour} thread.",
    "The charcoal burner gave them {dish} and asked for news of {town}.",
    "A deer stood on the path and looked at them without fear.",
    "The brambles had taken hold of {his} {clothes} and would not let go.",
    "\"We have passed this {tree} before,\" said {friend} {look}.",
    "There was a hollow full of {plant}, where there had once been a cottage.",
    "Rain began to tick on the leaves, though none of it reached them.",
};
constexpr SV kWoodClose[] = {
    "{late}, they came out on the far side, {distance} from where they had meant to.",
    "They were home before {sound} ended, with leaves in their hair.",
    "{hero} looked back once, and the path had closed behind them.",
    "They had found few sticks, but nobody was {mood} about it.",
};

constexpr SV kMoneyOpen[] = {
    "{hero} owed {elder} for {few} sacks of {good}, and the day had come to pay.",
    "Money was short in {town} after {event}.",
    "{friend} kept what {fhe} had saved in a {adj} jug behind the {thing}.",
    "The {office} had come about the rent, and he was {mood}.",
};
constexpr SV kMoneyMiddle[] = {
    "There were {few} coins in the jug, and one of them was foreign.",
    "\"I can give you {good} until then,\" said {hero} {look}.",
    "{elder} wrote it {adverb} into a book with a {colour} cover.",
    "{friend} offered to sell the {thing}, but {hero} would not hear of it.",
    "They reckoned it on a slate, and it came out differently each time.",
    "For {span} they ate {dish} and nothing else.",
    "A {trade} is paid when the work is done, and the work was not done.",
    "The {stranger} at {inn} lent money, but people crossed the road to avoid him.",
    "{hero} took in work from {town2} and sat over it {adverb}.",
    "It was the same for everyone that {season}, and that was some comfort.",
    "{child} brought {chis} own two coins and put them on the table.",
    "The price of {good2} had fallen, and no one could say why.",
    "\"You have been a good neighbour,\" said {elder} {look}.",
    "Somebody had paid part of it already and would not be thanked.",
    "The {beast} was worth more than the cart, and neither was for sale.",
    "The {office} drank a cup of tea and forgot half of what he had come for.",
};
constexpr SV kMoneyClose[] = {
    "{late}, the debt was paid, and they struck it out of the book together.",
    "{elder} said that it could wait until {feast}, and so it waited.",
    "The jug was empty, but {hero} slept better than for {span}.",
    "{friend} hid the rest under the floor, and then could not find the board.",
};

constexpr SV kBellOpen[] = {
    "The bell of {town} had not been rung since {event}.",
    "{friend} was one of the ringers, of whom there were {few}.",
    "From the tower one sees {river}, {wood}, and on good days {town2}.",
    "The tower clock was slow, and all of {town} was slow with it.",
};
constexpr SV kBellMiddle[] = {
    "The stair is narrow, and the rope is as thick as a {tree} branch.",
    "{hero} climbed up {adverb} with a lantern and a {tool}.",
    "Jackdaws had filled the loft with sticks, a {find}, and part of a {clothes}.",
    "The sexton is {mood} and does not like visitors.",
    "On the rim stood the name of a founder from {town2}.",
    "The {part} of the great wheel had cracked in the frost.",
    "When it is rung, the {beast} of {elder} lies down in the road.",
    "{child} was allowed to pull once, and was lifted off {chis} feet.",
    "They oiled it with {good}, since there was nothing else.",
    "A {bird} had its nest behind the {colour} face of the clock.",
    "Through the floor came {sound} and a smell of {smell}.",
    "The {office} paid for the rope and wished it to be known.",
    "In a storm the whole tower moves, they say, by the width of a {find}.",
    "It needs {few} strong people and one who can count.",
    "{elder} could tell by the sound who was ringing.",
    "The weights are hung from {few} pulleys, each as large as a {thing}.",
};
constexpr SV kBellClose[] = {
    "{late}, it rang again, and people came out of their doors to listen.",
    "It was heard in {town2}, and the wind was not even from that side.",
    "They went down {adverb}, with cobwebs on their sleeves.",
    "Since then the clock has been fast, and {town} gets up too early.",
};

constexpr Scene kScenes[] = {
    {kMorningOpen, kMorningMiddle, kMorningClose}, {kRoadOpen, kRoadMiddle, kRoadClose},
    {kMarketOpen, kMarketMiddle, kMarketClose},    {kLetterOpen, kLetterMiddle, kLetterClose},
    {kGardenOpen, kGardenMiddle, kGardenClose},    {kRepairOpen, kRepairMiddle, kRepairClose},
    {kHistoryOpen, kHistoryMiddle, kHistoryClose}, {kSupperOpen, kSupperMiddle, kSupperClose},
    {kShopOpen, kShopMiddle, kShopClose},          {kBoatOpen, kBoatMiddle, kBoatClose},
    {kSchoolOpen, kSchoolMiddle, kSchoolClose},    {kBeastOpen, kBeastMiddle, kBeastClose},
    {kQuarrelOpen, kQuarrelMiddle, kQuarrelClose}, {kFeastOpen, kFeastMiddle, kFeastClose},
    {kFireOpen, kFireMiddle, kFireClose},          {kHouseOpen, kHouseMiddle, kHouseClose},
    {kHarvestOpen, kHarvestMiddle, kHarvestClose}, {kFoundOpen, kFoundMiddle, kFoundClose},
    {kGuestOpen, kGuestMiddle, kGuestClose},       {kSickOpen, kSickMiddle, kSickClose},
    {kWoodOpen, kWoodMiddle, kWoodClose},          {kMoneyOpen, kMoneyMiddle, kMoneyClose},
    {kBellOpen, kBellMiddle, kBellClose},
};

}  // namespace

std::span<const Scene> Scenes() {
  return kScenes;
}

}  // namespace omnikv::prose
